"""tables: writes tables and figures of documents from files of results; figures here are made up."""

import json
from typing import Any

import pytest

from benchmarks import tables

EAGER: dict[str, Any] = {"variant": "eager", "ms": 40.0, "reserved_mib": 2000, "max_allocated_mib": 1900}
EAGER |= {"graph_pools_mib": 0, "capture_seconds": 0.0, "steps": 30, "equal_steps": None}
GRAPHS: dict[str, Any] = {"variant": "native", "ms": 10.04, "reserved_mib": 2200, "max_allocated_mib": 1950}
GRAPHS |= {"graph_pools_mib": 300, "capture_seconds": 0.512, "steps": 30, "equal_steps": 29}
GRAPHS |= {"ratio_to_full_iteration": 1.25, "ratio_to_compute_alone": 1.5}
WHOLE = GRAPHS | {"variant": "full_iteration", "ms": 8.0, "reserved_mib": 2100}
ALONE = GRAPHS | {"variant": "compute_alone", "ms": 7.0}
EMPTY = (
    "# A project\n\n<!-- times by benchmarks/tables.py from: z a -->\n<!-- end of what tables.py made -->\n\n"
    "It takes 3.1<!--=z configurations/A/native/ms--> ms, 9.99<!--=z configurations/A/eager/ms over "
    "configurations/A/native/ms--> of it, 7,000<!--=z configurations/A/native/reserved_mib--> MiB.\n"
)


def results(*rows: dict[str, Any], name: str = "A:--num-layers 3") -> dict[str, Any]:
    found = {"command": "python it.py", "hardware": "2 x NVIDIA H100 80GB HBM3", "commit": "a1"}
    return found | {"configurations": {name: list(rows)}}


def cells(kind: str, *files: dict[str, Any]) -> list[dict[str, str]]:
    names = ["one", *(f"other_{number}" for number in range(1, len(files)))]
    written = {
        f"results/{name}.json": {"commit": "a1", "hardware": "1 x NVIDIA H200"} | found
        for name, found in zip(names, files, strict=True)
    }
    header, *rows = tables.KINDS[kind](written)
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_times_lists_ratios_memory_and_equal_steps():
    assert cells("times", results(EAGER, GRAPHS, WHOLE)) == [
        {
            "model": "A: 16 layers, hidden 2048, sequence 2048, `--num-layers 3`",
            "GPUs, results": "[2 x H100](results/one.json)",
            "eager: ms": "40.0",
            "graphs: ms": "10.0",
            "time / eager": "0.25",
            "time / full iteration": "1.25",
            "memory / eager": "1.10",
            "steps equal to eager's": "29 of 30",
            "commit": "a1",
        }
    ]


def test_graphs_are_compared_with_eager_runs_of_equal_flags():
    grouped = [row | {"variant": f"{row['variant']}+grouped", "ms": row["ms"] / 2} for row in (EAGER, GRAPHS)]
    plain, flagged = cells("times", results(EAGER, GRAPHS, *grouped, name="C"))
    assert (plain["eager: ms"], flagged["eager: ms"]) == ("40.0", "20.0")
    assert flagged["model"] == f"{plain['model']}, `--moe-use-grouped-tensor`"


def test_launches_show_median_and_range():
    several = [{"ms": ms, "ratio_to_full_iteration": ms / 8} for ms in (9.0, 10.04, 12.0)]
    (row,) = cells("launches", results(EAGER, GRAPHS | {"launches": several}, WHOLE, ALONE))
    assert row["eager: ms"] == "40.0"
    assert row["graphs: ms"] == "10.0 (9.0 to 12.0)"
    assert row["full iteration: ms"] == "8.0"
    assert row["compute alone: ms"] == "7.0"
    assert row["graphs / full iteration"] == "1.25 (1.12 to 1.50)"
    assert row["graphs / compute alone"] == "1.50"


def test_equality_counts_negative_controls_separately():
    case = {"tests": "test_a", "engine": "native", "differences": [], "error": "", "case": "dtype=bf16"}
    other = case | {"tests": "test_b", "engine": "transformer_engine", "layout": "tensor parallel"}
    dead = case | {"case": "dtype=bf16 control=dead_replay", "differences": ["loss"]}
    found = {"results": [case, case | {"differences": ["loss"]}, dead, other | {"error": "no"}, other], "cases": 7}
    one, two, left = cells("equality", found)
    assert (one["what"], one["equal"], one["others"]) == (
        "`tests/gpu/test_a.py`",
        "1 of 2",
        "1 differ, 1 differ and must",
    )
    assert (two["engine"], two["layout"], two["others"]) == ("TransformerEngine's", "tensor parallel", "1 failed")
    assert (left["what"], left["others"]) == ("not run", "2 cases")


def test_soaks_and_faults_count_successes():
    moe = {"steps": 500, "resumed_after": 250, "differing_steps": [7], "flat": False}
    (row,) = cells("soaks", {"moe": moe})
    assert (row["losses and norms equal to eager's"], row["memory"]) == ("499 of 500", "grows")
    summed = {"what": "all", "case": "x", "passed": 1999, "attempts": 2000, "commit": "b2"}
    counted = {"case": "layers=2", "passed": {"memory": 3, "interrupt": 4}, "attempts": {"memory": 3, "interrupt": 5}}
    one, two = cells("faults", {"results": [summed, counted]})
    assert (one["case"], one["passed"], one["commit"]) == ("all", "1,999 of 2,000", "b2")
    assert (two["case"], two["passed"], two["commit"]) == ("`layers=2`", "7 of 8", "a1")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with results and a document with an empty table."""
    folder = tmp_path / tables.RESULTS
    folder.mkdir(parents=True)
    for name, configuration in (("z", "A"), ("a", "B")):
        (folder / f"{name}.json").write_text(json.dumps(results(EAGER, GRAPHS, name=configuration)))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").write_text(EMPTY)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", ("docs/page.md",))
    return tmp_path / "docs/page.md"


def test_writing_a_document_twice_changes_nothing(project):
    assert tables.main([]) == 0
    written = project.read_text()
    assert written.startswith("# A project\n")
    rows = [line for line in written.splitlines() if line.startswith("| ")][1:]
    assert [row[2] for row in rows] == ["A", "B"]
    assert f"(../{tables.RESULTS}/z.json)" in rows[0]
    assert "It takes 10.0<!--" in written
    assert " ms, 3.98<!--" in written
    assert " of it, 2,200<!--" in written
    assert tables.main([]) == 0
    assert project.read_text() == written


def test_manual_changes_are_found_and_overwritten(project):
    tables.main([])
    written = project.read_text()
    assert tables.main(["--check"]) == 0
    for figure in "| 10.0 |", "takes 10.0":
        project.write_text(written.replace(figure, figure.replace("10.0", "9.9"), 1))
        assert tables.main(["--check"]) == 1
        assert "9.9" in project.read_text()
        assert tables.main([]) == 0
        assert project.read_text() == written


def test_documents_match_their_files():
    assert tables.main(["--check"]) == 0
    assert all(tables.BLOCK.search((tables.ROOT / name).read_text()) for name in tables.DOCUMENTS[:1])
