"""docs/compatibility.md is made of the table of flags."""

from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from megatron.core.transformer._cuda_graphs.flags.table import Row, Verdict
from tests.support.compatibility import ROWS, page
from tests.support.working_flags import Working

COMMITTED = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_committed_page_is_up_to_date():
    assert COMMITTED.read_text() == page(), "run make docs"


def works(flags: str = "--bf16") -> Working:
    return Working("a feature", flags, "tests/one.py")


def refused(flags: str) -> Row:
    return Row(flags, Verdict.REFUSED, "no", lambda options: True)


def lines_of(table: Iterable[Row | Working]) -> list[str]:
    return [line for line in page(table).splitlines() if line.startswith("| ") and "what to know" not in line]


def test_every_row_is_a_line_with_its_verdict():
    for each in ROWS:
        (line,) = lines_of([each])
        assert line.startswith(f"| {each.flags} | "), each.flags
        verdict = "works" if isinstance(each, Working) else each.verdict.value
        assert verdict in line and line.endswith(f" | {each.words} |"), each.flags


def test_what_works_is_linked_to_the_test_that_shows_it():
    assert lines_of([works()]) == ["| --bf16 | [works](../tests/one.py): model |  |"]


def test_rows_stand_under_their_topic_those_that_work_first():
    both = page([refused("--fp16"), works()])
    assert both.index("--bf16") < both.index("--fp16")
    titles = [line for line in page([works("--save"), refused("--fp16")]).splitlines() if line.startswith("## ")]
    assert titles == ["## Precision", "## Optimizer and checkpoints"]


def test_every_row_has_a_topic():
    assert "## Other flags" in page([works("--unknown")])
    assert "## Other flags" not in page(), "add the flag to TOPICS"


def test_a_bar_does_not_end_a_cell():
    assert "| --fp8-a\\|b | refused |" in page([refused("--fp8-a|b")])
