"""Test that the results page and the figures in README match the results files."""

import json
import re
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
README = (tables.ROOT / "README.md").read_text()


def results(*rows: dict[str, Any], name: str = "A:--num-layers 3") -> dict[str, Any]:
    found = {"command": "python it.py", "hardware": "2 x NVIDIA H100 80GB HBM3", "commit": "a1"}
    return found | {"configurations": {name: list(rows)}}


def cells(table: str, *files: dict[str, Any]) -> list[dict[str, str]]:
    header, *rows = tables.TABLES[table]([{"commit": "a1", "hardware": "1 x NVIDIA H200"} | found for found in files])
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_graphs_are_compared_with_eager_runs_of_equal_flags():
    grouped = [row | {"variant": f"{row['variant']}+grouped", "ms": row["ms"] / 2} for row in (EAGER, GRAPHS)]
    plain, flagged = cells("launches", results(EAGER, GRAPHS, *grouped, name="C"))
    assert (plain["eager (ms)"], flagged["eager (ms)"]) == ("40.0", "20.0")
    assert flagged["model"] == f"{plain['model']}, `--moe-use-grouped-tensor`"


def test_launches_show_median_and_range():
    several = [{"ms": ms, "ratio_to_full_iteration": ms / 8} for ms in (9.0, 10.04, 12.0)]
    (row,) = cells("launches", results(EAGER, GRAPHS | {"launches": several}, WHOLE, ALONE))
    assert row["eager (ms)"] == "40.0"
    assert row["graphs (ms)"] == "10.0 (9.0 to 12.0)"
    assert row["full iteration (ms)"] == "8.0"
    assert row["compute alone (ms)"] == "7.0"
    assert row["graphs / full iteration"] == "1.25 (1.12 to 1.50)"
    assert row["graphs / compute alone"] == "1.50"


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
        "# Results\n\n{{launches: one}}\n\nIt takes {{.1f: one configurations/A/native/ms}} ms.\n"
    )
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "TEMPLATE", tmp_path / "template")
    monkeypatch.setattr(tables, "PAGE", tmp_path / "page.md")
    return tmp_path / "page.md"


def test_page_is_written_from_template_and_results(project):
    assert tables.main([]) == 0
    title, header, _, row, text = filter(None, project.read_text().splitlines())
    assert title == "# Results"
    assert header.startswith("| model | GPUs |")
    assert row.startswith("| A | 2 x H100 | 40.0 | 10.0 |")
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


STEPS = "release/step_time_{}_2gpu configurations/{}/{}/{}"
GROUPED = STEPS.format("c_d", "{}", "{}+grouped", "{}")
LLAMA_3B = "release/step_time_llama_3b_2gpu configurations/llama-3.2-3b/{}/{}"
LLAMA_8B = "release/step_time_llama_8b_2gpu configurations/llama-3.1-8b/{}/{}"
QWEN = "release/step_time_qwen_2gpu configurations/qwen3-30b-a3b/{}+grouped/{}"
# Figures quoted in README, and their sources.
QUOTED = {
    "159.9": STEPS.format("a_b", "A", "eager", "ms"),
    "40.6": STEPS.format("a_b", "A", "native", "ms"),
    "1.00": STEPS.format("a_b", "A", "native", "ratio_to_full_iteration"),
    "235.1": LLAMA_3B.format("eager", "ms"),
    "223.2": LLAMA_3B.format("native", "ms"),
    "477.8": LLAMA_8B.format("eager", "ms"),
    "468.2": LLAMA_8B.format("native", "ms"),
    "369.8": QWEN.format("eager", "ms"),
    "158.7": QWEN.format("native", "ms"),
    "225.1": GROUPED.format("D", "eager", "ms"),
    "14.8": GROUPED.format("D", "native", "ms"),
}
# Ratios of graphs to another variant, by row and column of README's table.
RATIOS = {("A", -2): (STEPS.format("a_b", "A", "{}", "reserved_mib"), "eager")}
SIZED = {"Llama-3.2-3B": LLAMA_3B, "Llama-3.1-8B": LLAMA_8B, "Qwen3-30B-A3B": QWEN}
for name, where in {"D": GROUPED.replace("{}", "D", 1), **SIZED}.items():
    RATIOS[name, -2] = where.format("{}", "reserved_mib"), "eager"
    RATIOS[name, -3] = where.format("{}", "ms"), "full_iteration"


@pytest.mark.parametrize(("quoted", "source"), QUOTED.items())
def test_figure_of_readme_matches_its_source(quoted, source):
    assert re.search(rf"(?<![\d.]){re.escape(quoted)}(?![\d.])", README)
    assert format(tables.figure(*source.split(maxsplit=1)), f".{len(quoted.partition('.')[2])}f") == quoted


@pytest.mark.parametrize(("model", "column"), RATIOS)
def test_ratio_of_readme_matches_its_source(model, column):
    source, other = RATIOS[model, column]
    graphs, base = (tables.figure(*source.format(variant).split(maxsplit=1)) for variant in ("native", other))
    (row,) = re.findall(rf"^\| {model}: .*\|$", README, re.MULTILINE)
    assert row.split("|")[column].strip() == f"{graphs / base:.2f}"


def test_readme_quotes_no_other_figure_in_its_table():
    rows = [row.split("|") for row in re.findall(r"^\| [A-Z][\w.-]*: .*$", README, re.MULTILINE)]
    checked = {row[column].strip() for row in rows for model, column in RATIOS if row[1].startswith(f" {model}:")}
    assert {cell.strip() for row in rows for cell in row[2:5]} <= {"", "not possible", *QUOTED, *checked}
