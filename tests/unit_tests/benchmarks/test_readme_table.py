"""README's table of a step is made from files of results; the figures here are made up."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme_table

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "readme_table.py"
EMPTY = f"# A project\n\n{readme_table.COMMENT.format('')}\n{readme_table.END}\n\nMore.\n"
EAGER = {"variant": "eager", "ms": 40.0, "reserved_mib": 2000, "steps": 30, "equal_steps": None}
GRAPHS = {"variant": "native", "ms": 10.04, "reserved_mib": 2200, "steps": 30, "equal_steps": 29}
WHOLE = {"variant": "full_iteration", "ms": 8.0, "reserved_mib": 2100, "steps": 30, "equal_steps": 30}


def results(*rows: dict[str, Any], name: str = "A:--num-layers 3") -> dict[str, Any]:
    return {"command": "python it.py", "hardware": "2 x a GPU", "configurations": {name: list(rows)}}


def cells(*rows: dict[str, Any], **more: Any) -> dict[str, str]:
    text = readme_table.rewritten(EMPTY, {"results/one.json": results(*rows, **more)})
    (line,) = [line for line in text.splitlines() if line.startswith("| ") and "time / eager" not in line]
    found = [cell.strip() for cell in line.strip("|").split("|")]
    return dict(zip(readme_table.HEADER, found, strict=True))


def test_a_row_has_times_ratios_memory_and_equal_steps():
    assert cells(EAGER, GRAPHS, WHOLE) == {
        "model": "A: 16 layers, hidden 2048, sequence 2048, `--num-layers 3`",
        "GPUs, results": "[2 x a GPU](results/one.json)",
        "eager: ms": "40.0",
        "graphs: ms": "10.0",
        "time / eager": "0.25",
        "time / full iteration": "1.25",
        "memory / eager": "1.10",
        "steps equal to eager's": "29 of 30",
    }


def test_a_full_iteration_that_failed_is_told_from_one_that_did_not_run():
    failed = {"variant": "full_iteration", "error": "rank 1: no"}
    assert cells(EAGER, GRAPHS, failed)["time / full iteration"] == "cannot be captured"
    assert cells(EAGER, GRAPHS)["time / full iteration"] == "not run"


def test_a_configuration_without_flags_is_its_description():
    assert cells(EAGER, GRAPHS, name="B")["model"] == "B: 8 layers, hidden 1024, sequence 512"


def test_rows_are_in_the_order_of_files_and_names():
    both = results(EAGER, GRAPHS, name="B")
    both["configurations"]["A"] = [EAGER, GRAPHS]
    text = readme_table.rewritten(EMPTY, {"z.json": both, "a.json": results(EAGER, GRAPHS, name="C")})
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert [row[2] for row in rows] == ["A", "B", "C"]


@pytest.fixture
def readme(tmp_path):
    """A README without a table, beside a file of results."""
    (tmp_path / "found.json").write_text(json.dumps(results(EAGER, GRAPHS)))
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
    assert "| 40.0 | 10.0 |" in written
    assert run(readme) == 0
    assert readme.read_text() == written


def test_a_figure_changed_by_hand_is_noticed_and_written_anew(readme):
    run(readme, str(readme.with_name("found.json")))
    written = readme.read_text()
    assert run(readme, "--check") == 0
    readme.write_text(written.replace("10.0", "9.9"))
    assert run(readme, "--check") == 1
    assert "9.9" in readme.read_text()
    assert run(readme) == 0
    assert readme.read_text() == written


def test_a_readme_without_a_place_for_the_table_is_refused():
    with pytest.raises(ValueError, match="README must have one line"):
        readme_table.files_named("# A project\n")


def test_readme_says_what_its_files_say():
    assert run(ROOT / "README.md", "--check") == 0
