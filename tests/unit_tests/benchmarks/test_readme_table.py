"""README's tables and plot of a step are made from files of results; the figures here are made up."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme_table
from benchmarks._step_time import markdown, variants

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "readme_table.py"
EMPTY = f"# A project\n\n{readme_table.COMMENT.format('')}\n{readme_table.END}\n\nMore.\n"


def row(variant: str, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"variant": variant, "ms": 12.34, "reserved_mib": 2048, "graphs": 0}
    found |= {"capture_seconds": 0.0, "steps": 40, "reference": None, "equal_steps": None}
    return found | {f"ratio_to_{other}": None for other in ("eager", "full_iteration", "compute")} | more


NATIVE = row(
    "native",
    graphs=16,
    capture_seconds=0.456,
    reference="eager",
    equal_steps=39,
    ratio_to_eager=0.5,
    ratio_to_full_iteration=1.054,
    profile={"compute_ms": 6.0, "nccl_alone_ms": 1.0, "calls": {"launches": 123.4, "graph_launches": 32.0}},
)


def results(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = {"command": "python it.py --gpus 2", "hardware": "2 x a GPU", "versions": {"torch": "9.9", "python": "3"}}
    return {**found, "configurations": {"A:--num-layers 3": list(rows)}, **more}


def cells(found: dict[str, Any]) -> list[str]:
    line = markdown.section(results(found)).splitlines()[-1]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_says_ratios_capture_launches_and_equal_steps():
    assert cells(NATIVE) == [
        "graphs, this engine",
        "12.3",
        "0.50",
        "1.05",
        "2048",
        "0.46",
        "123 + 32",
        "39 of 40",
    ]


def test_eager_has_no_capture_and_no_reference():
    line = markdown.section(results(row("eager"), NATIVE)).splitlines()[-2]
    assert [cell.strip() for cell in line.strip("|").split("|")][-4:] == ["2048", "", "", ""]


def test_columns_without_a_value_are_left_out():
    assert cells(row("eager", reserved_mib=0)) == ["Megatron-FSDP, eager", "12.3"]


def test_graphs_of_the_whole_model_have_a_name_of_their_own():
    assert markdown.variant_name(f"{markdown.LAYERS_PER_GRAPH}model") == "graphs, this engine, of the whole model"
    assert markdown.variant_name(f"{markdown.LAYERS_PER_GRAPH}all") == "graphs, this engine, of layers only"


def test_what_failed_is_in_the_table_with_its_error():
    assert cells({"variant": "te", "error": "rank 1: Traceback\nRuntimeError: no"})[1] == "RuntimeError: no"


def test_two_runs_that_differ_are_named():
    assert cells(NATIVE | {"repeatable": False})[-1] == "39 of 40 (two runs differ)"


def test_every_row_has_as_many_cells_as_the_header():
    failed = {"variant": "te", "error": "a | b"}
    lines = markdown.section(results(row("eager"), NATIVE, failed)).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert len(table) == 5


def test_tables_stand_behind_hardware_versions_and_command():
    first = markdown.section(results(NATIVE)).splitlines()[0]
    assert first == "2 x a GPU, torch 9.9; `python it.py --gpus 2`:"


def test_a_note_stays_with_its_figures():
    assert "means nothing" in markdown.section(results(NATIVE, note="It means nothing."))


def test_every_variant_has_a_name_and_further_flags_stay_visible():
    assert all(markdown.variant_name(name) for name in variants.VARIANTS)
    assert markdown.variant_name("native+optimizer").endswith(", the optimizer's graph")
    assert markdown.variant_name("native::--seed 1") == "graphs, this engine, `--seed 1`"


def test_a_configuration_is_described_where_it_was_trained_on_gpus():
    described = "A: 16 layers, hidden 2048, sequence 2048, `--num-layers 3`"
    assert markdown.heading_of("A:--num-layers 3", results()) == described
    assert markdown.heading_of("A:--num-layers 3", results(note="It means nothing.")) == "A:--num-layers 3"


@pytest.fixture
def readme(tmp_path):
    """A README without tables, beside a file of results."""
    (tmp_path / "found.json").write_text(json.dumps(results(row("eager"), NATIVE)))
    path = tmp_path / "README.md"
    path.write_text(EMPTY)
    return path


def run(readme: Path, *arguments: str) -> int:
    command = [sys.executable, str(SCRIPT), *arguments, "--readme", str(readme)]
    return subprocess.run(command, check=False, capture_output=True).returncode


def test_readme_is_written_once_and_then_stays(readme):
    assert run(readme, str(readme.with_name("found.json"))) == 0
    written = readme.read_text()
    assert written.startswith("# A project\n") and written.endswith("\n\nMore.\n")
    assert "| graphs, this engine | 12.3 |" in written
    assert "](found.png)" in written
    assert readme.with_name("found.png").read_bytes().startswith(b"\x89PNG")
    assert run(readme) == 0
    assert readme.read_text() == written


def test_a_figure_changed_by_hand_is_noticed_and_written_anew(readme):
    run(readme, str(readme.with_name("found.json")))
    written = readme.read_text()
    assert run(readme, "--check") == 0
    readme.write_text(written.replace("12.3", "11.9"))
    assert run(readme, "--check") == 1
    assert "11.9" in readme.read_text()
    assert run(readme) == 0
    assert readme.read_text() == written


def test_a_readme_without_a_place_for_tables_is_refused():
    with pytest.raises(ValueError, match="README must have one line"):
        readme_table.files_named("# A project\n")


def test_readme_says_what_its_files_say():
    assert run(ROOT / "README.md", "--check") == 0
