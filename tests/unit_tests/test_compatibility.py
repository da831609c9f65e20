"""docs/compatibility.md is made of the table of flags."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from megatron.core.transformer._cuda_graphs.flag_row import Row, Verdict
from megatron.core.transformer._cuda_graphs.flag_table import TABLE
from megatron_fsdp_cuda_graphs.compatibility import page

COMMITTED = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_committed_page_is_up_to_date():
    assert COMMITTED.read_text() == page(), "run make docs"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_row_is_a_line_under_its_verdict(row):
    (line,) = [line for line in page([row]).splitlines() if line.startswith("| ") and "what to know" not in line]
    assert line.startswith(f"| {row.flags} | {row.words} | ")


def test_sections_without_rows_are_left_out():
    row = Row("name", "--flag", Verdict.REFUSED, lambda options: True, "--flag cannot be used", "tests")
    assert [line for line in page([row]).splitlines() if line.startswith("## ")] == [
        "## Refused before anything runs, with these words"
    ]


def test_a_bar_does_not_end_a_cell():
    row = Row("name", "--a|b", Verdict.WORKS, lambda options: True)
    assert "| --a\\|b |  | none |" in page([row])
