"""docs/compatibility.md is made of the table of flags."""

from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from megatron.core.transformer._cuda_graphs.flags.table import TABLE, Row, Verdict
from tests.support.compatibility import page

COMMITTED = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_committed_page_is_up_to_date():
    assert COMMITTED.read_text() == page(), "run make docs"


def row(flags: str = "--bf16", verdict: Verdict = Verdict.WORKS, words: str = "", shown: str = "") -> Row:
    return Row(flags, verdict, words, shown)


def lines_of(table: Iterable[Row]) -> list[str]:
    return [line for line in page(table).splitlines() if line.startswith("| ") and "what to know" not in line]


def test_every_row_is_a_line_with_its_verdict():
    for each in TABLE:
        (line,) = lines_of([each])
        assert line.startswith(f"| {each.flags} | "), each.flags
        assert each.verdict.value in line and line.endswith(f" | {each.words} |"), each.flags


def test_what_works_is_linked_to_the_test_that_shows_it():
    assert lines_of([row(shown="tests/one.py")]) == ["| --bf16 | [works](../tests/one.py) |  |"]
    assert lines_of([row()]) == ["| --bf16 | works |  |"]


def test_rows_stand_under_their_topic_those_that_work_first():
    refused = row("--fp16", Verdict.REFUSED, "no")
    assert page([refused, row()]).index("--bf16") < page([refused, row()]).index("--fp16")
    titles = [line for line in page([row("--save"), refused]).splitlines() if line.startswith("## ")]
    assert titles == ["## Precision", "## Optimizer and checkpoints"]


def test_every_row_has_a_topic():
    assert "## Other flags" in page([row("--unknown")])
    assert "## Other flags" not in page(), "add the flag to TOPICS"


def test_a_bar_does_not_end_a_cell():
    assert "| --fp8-a\\|b | works |" in page([row("--fp8-a|b")])
