"""Tables of documents are made from files of results; the figures here are made up."""

import json
from typing import Any

import pytest

from benchmarks import tables

EAGER: dict[str, Any] = {"variant": "eager", "ms": 40.0, "reserved_mib": 2000, "max_allocated_mib": 1900}
EAGER |= {"graph_pools_mib": 0, "capture_seconds": 0.0, "steps": 30, "equal_steps": None}
GRAPHS: dict[str, Any] = {"variant": "native", "ms": 10.04, "reserved_mib": 2200, "max_allocated_mib": 1950}
GRAPHS |= {"graph_pools_mib": 300, "capture_seconds": 0.512, "steps": 30, "equal_steps": 29}
WHOLE = GRAPHS | {"variant": "full_iteration", "ms": 8.0, "reserved_mib": 2100}
EMPTY = (
    "# A project\n\n<!-- times by benchmarks/tables.py from: found -->\n<!-- end of what tables.py made -->\n\nMore.\n"
)


def results(*rows: dict[str, Any], name: str = "A:--num-layers 3") -> dict[str, Any]:
    return {"command": "python it.py", "hardware": "2 x a GPU", "configurations": {name: list(rows)}}


def cells(kind: str, found: dict[str, Any]) -> list[dict[str, str]]:
    header, *rows = tables.KINDS[kind]({"results/one.json": found})
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_a_row_has_times_ratios_memory_and_equal_steps():
    assert cells("times", results(EAGER, GRAPHS, WHOLE)) == [
        {
            "model": "A: 16 layers, hidden 2048, sequence 2048, `--num-layers 3`",
            "GPUs, results": "[2 x a GPU](results/one.json)",
            "eager: ms": "40.0",
            "graphs: ms": "10.0",
            "time / eager": "0.25",
            "time / full iteration": "1.25",
            "memory / eager": "1.10",
            "steps equal to eager's": "29 of 30",
        }
    ]


def test_a_full_iteration_that_failed_is_told_from_one_that_did_not_run():
    failed = {"variant": "full_iteration", "error": "rank 1: no"}
    said = [cells("times", results(EAGER, GRAPHS, *more))[0]["time / full iteration"] for more in ((failed,), ())]
    assert said == ["cannot be captured", "not run"]


def test_graphs_are_compared_with_the_eager_training_that_has_their_flags():
    grouped = [row | {"variant": f"{row['variant']}+grouped", "ms": row["ms"] / 2} for row in (EAGER, GRAPHS)]
    plain, flagged = cells("times", results(EAGER, GRAPHS, *grouped, name="C"))
    assert (plain["eager: ms"], flagged["eager: ms"]) == ("40.0", "20.0")
    assert flagged["model"] == f"{plain['model']}, `--moe-use-grouped-tensor`"


def test_a_variant_without_its_eager_training_is_left_out():
    assert cells("times", results(GRAPHS)) == []


def test_memory_has_a_row_for_each_variant_that_ran():
    failed = {"variant": "full_iteration", "error": "rank 1: no"}
    eager, graphs = cells("memory", results(EAGER, GRAPHS, failed, name="B"))
    assert [*eager.values()][2:] == ["eager", "2000", "1900", "0", "0.00"]
    assert [*graphs.values()][2:] == ["graphs", "2200", "1950", "300", "0.51"]


def test_equality_counts_cases_by_tests_and_engine():
    case = {"tests": "test_a", "engine": "native", "differences": [], "error": ""}
    other = case | {"tests": "test_b"}
    found = {"hardware": "a GPU", "results": [case, case | {"differences": ["loss"]}, other | {"error": "no"}, other]}
    one, two = cells("equality", found)
    assert (one["tests"], one["equal to eager training"], one["others"]) == ("test_a", "1 of 2", "1 differs")
    assert (two["tests"], two["equal to eager training"], two["others"]) == ("test_b", "1 of 2", "1 failed")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with a document that has no table yet, and a folder of results."""
    (tmp_path / "found").mkdir()
    for name, configuration in (("z", "A"), ("a", "B")):
        (tmp_path / "found" / f"{name}.json").write_text(json.dumps(results(EAGER, GRAPHS, name=configuration)))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").write_text(EMPTY)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", ("docs/page.md",))
    return tmp_path / "docs/page.md"


def test_a_document_is_written_once_and_then_stays(project):
    assert tables.main([]) == 0
    written = project.read_text()
    assert written.startswith("# A project\n") and written.endswith("\n\nMore.\n")
    rows = [line for line in written.splitlines() if line.startswith("| ")][1:]
    assert [row[2] for row in rows] == ["B", "A"]
    assert "(../found/a.json)" in rows[0]
    assert tables.main([]) == 0
    assert project.read_text() == written


def test_a_figure_changed_by_hand_is_noticed_and_written_anew(project):
    tables.main([])
    written = project.read_text()
    assert tables.main(["--check"]) == 0
    project.write_text(written.replace("10.0", "9.9"))
    assert tables.main(["--check"]) == 1
    assert "9.9" in project.read_text()
    assert tables.main([]) == 0
    assert project.read_text() == written


def test_documents_say_what_their_files_say():
    assert tables.main(["--check"]) == 0
    assert all(tables.BLOCK.search((tables.ROOT / name).read_text()) for name in tables.DOCUMENTS[:1])
