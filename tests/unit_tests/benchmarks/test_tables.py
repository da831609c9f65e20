"""Test that the results page and the figures in README match the results files."""

import json
import re
from typing import Any

import pytest

from benchmarks import tables
from benchmarks._tables import steps

EAGER: dict[str, Any] = {"variant": "eager", "ms": 40.0, "reserved_mib": 2000, "max_allocated_mib": 1900}
EAGER |= {"graph_pools_mib": 0, "capture_seconds": 0.0, "steps": 30, "equal_steps": None}
GRAPHS: dict[str, Any] = {"variant": "native", "ms": 10.04, "reserved_mib": 2200, "max_allocated_mib": 1950}
GRAPHS |= {"graph_pools_mib": 300, "capture_seconds": 0.512, "steps": 30, "equal_steps": 29}
GRAPHS |= {"tokens_per_second": 1000, "tflops": 98.94}
WHOLE = GRAPHS | {"variant": "full_iteration", "ms": 8.0, "reserved_mib": 2100}
ALONE = GRAPHS | {"variant": "compute_alone", "ms": 7.0}
README = (tables.ROOT / "README.md").read_text()


def results(*rows: dict[str, Any], name: str = "A:--num-layers 3") -> dict[str, Any]:
    found = {"command": "python it.py", "hardware": "2 x NVIDIA H100 80GB HBM3", "commit": "a1"}
    return found | {"configurations": {name: list(rows)}}


def cells(table: str, *files: dict[str, Any]) -> list[dict[str, str]]:
    header, *rows = tables.TABLES[table]([{"commit": "a1", "hardware": "1 x NVIDIA H200"} | found for found in files])
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_grouped_experts_have_their_own_row():
    grouped = [row | {"variant": f"{row['variant']}+grouped", "ms": row["ms"] / 2} for row in (EAGER, GRAPHS)]
    plain, flagged = cells("steps", results(EAGER, GRAPHS, *grouped, name="C"))
    assert (plain["eager (ms)"], flagged["eager (ms)"]) == ("40.0", "20.0")
    assert flagged["model"] == f"{plain['model']}, `--moe-use-grouped-tensor`"


def test_steps_compare_graphs_with_other_variants():
    (row,) = cells("steps", results(EAGER, GRAPHS, GRAPHS | {"variant": steps.PARTS, "ms": 20.0}, WHOLE, ALONE))
    assert tuple(row.values())[1:6] == ("40.0", "10.0", "20.0", "8.0", "7.0")
    assert (row["graphs / full iteration"], row["graphs / compute alone"]) == ("1.25", "1.43")
    assert (row["MFU"], row["memory, eager"], row["equal steps"]) == ("10%", "2000", "29 of 30")


def test_a_failed_variant_leaves_its_cells_empty():
    (row,) = cells("steps", results(EAGER, GRAPHS, {"variant": "full_iteration", "error": "out of memory"}))
    assert (row["full iteration (ms)"], row["graphs / full iteration"]) == ("-", "-")


def test_levers_compare_equal_settings():
    fused = [row | {"variant": f"{row['variant']}+fused", "ms": row["ms"] / 2} for row in (WHOLE, ALONE)]
    settings = "+fused:NCCL_CTA_POLICY=2:--use-nccl-ub"
    own = [row | {"variant": row["variant"] + settings, "reference": None} for row in (GRAPHS, WHOLE)]
    (row,) = cells("levers", results(*own, *fused))
    assert row["settings"] == "fused, user buffers"
    assert (row["full iteration (ms)"], row["compute alone (ms)"], row["equal steps"]) == ("8.0", "3.5", "-")


def test_equality_counts_each_case_once():
    case = {"tests": "test_a", "engine": "native", "differences": [], "error": "", "case": "dtype=bf16"}
    other = case | {"tests": "test_b", "engine": "transformer_engine", "layout": "tensor parallel", "error": "no"}
    dead, differs = (case | {"case": name, "differences": ["loss"]} for name in ("control=dead_replay", "dtype=fp16"))
    one, two = cells("equality", {"results": [case, dead, other]}, {"results": [differs, dead, other | {"error": ""}]})
    assert (one["what"], one["equal"], one["others"]) == ("`test_a`", "1 of 2", "1 must differ, 1 differ")
    assert (two["what"], two["layouts"]) == ("`test_b`, TransformerEngine's engine", "tensor parallel")
    assert (two["equal"], two["others"]) == ("0 of 1", "1 failed")


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
    """Write a results file and a template; return the path of the results page that tables.py will write."""
    (tmp_path / "one.json").write_text(json.dumps(results(EAGER, GRAPHS, name="A")))
    (tmp_path / "template").write_text(
        "# Results\n\n{{steps: one}}\n\nIt takes {{.1f: one configurations/A/native/ms}} ms.\n"
    )
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "TEMPLATE", tmp_path / "template")
    monkeypatch.setattr(tables, "PAGE", tmp_path / "page.md")
    return tmp_path / "page.md"


def test_page_is_written_from_template_and_results(project):
    assert tables.main([]) == 0
    title, header, _, row, text = filter(None, project.read_text().splitlines())
    assert title == "# Results"
    assert header.startswith("| model | eager (ms) |")
    assert row.startswith("| A | 40.0 | 10.0 |")
    assert text == "It takes 10.0 ms."


def test_manual_changes_of_the_page_are_found(project):
    assert tables.main(["--check"]) == 1
    assert not project.exists()
    tables.main([])
    assert tables.main(["--check"]) == 0
    project.write_text(project.read_text().replace("takes 10.0", "takes 9.9"))
    assert tables.main(["--check"]) == 1


def test_results_page_matches_its_files():
    assert tables.main(["--check"]) == 0


DENSE, MOE, LLAMA, EXPERTS = (f"release/step_time_{name}_2gpu" for name in ("dense", "moe", "llama", "experts"))
# Rows of README's table: file, configuration and suffix of variants.
ROWS = {
    "A": (DENSE, "A", ""),
    "D": (MOE, "D", "+grouped"),
    "Llama-3.2-3B": (LLAMA, "llama-3.2-3b", ""),
    "Llama-3.1-8B": (LLAMA, "llama-3.1-8b", ""),
    "Qwen3-30B-A3B": (EXPERTS, "qwen3-30b-a3b", "+grouped"),
}


def test_release_has_one_commit():
    commits = {json.loads(file.read_text())["commit"] for file in (tables.RESULTS / "release").glob("*.json")}
    assert len(commits) == 1


@pytest.mark.parametrize("model", ROWS)
def test_row_of_readme_matches_its_source(model):
    file, configuration, suffix = ROWS[model]
    eager, graphs, whole = (
        {
            key: tables.value(file, f"configurations/{configuration}/{name}{suffix}/{key}")
            for key in ("ms", "reserved_mib")
        }
        for name in ("eager", "native", "full_iteration")
    )
    (row,) = re.findall(rf"^\| {model}: .*\|$", README, re.MULTILINE)
    expected = [f"{eager['ms']:.1f}", f"{graphs['ms']:.1f}", f"{graphs['ms'] / whole['ms']:.2f}"]
    expected.append(f"{graphs['reserved_mib'] / eager['reserved_mib']:.2f}")
    assert [cell.strip() for cell in row.split("|")[2:-1]] == expected


def test_readme_quotes_the_table_in_its_introduction():
    quoted = re.findall(r"from\s+([\d.]+)\s+to\s+([\d.]+) ms", README.partition("## Start")[0])
    rows = [row.split("|") for row in re.findall(r"^\| [A-Z][\w.-]*: .*$", README, re.MULTILINE)]
    assert len(quoted) == 3
    assert set(quoted) <= {(row[2].strip(), row[3].strip()) for row in rows}
