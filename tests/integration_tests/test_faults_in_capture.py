"""Captures that fail, on one rank or on both, leave nothing behind: no rank waits, and training goes on bit for bit.

A sample of the places where they can fail. For all of them run ``tests/support/inject_faults.py`` with no ``--stride``.
"""

import pytest

from tests.support.launch import inject_faults


@pytest.mark.parametrize(
    "options",
    [
        ("--stride", "401", "--layers-per-graph", "0", "1", "-1"),
        ("--matching", "ProcessGroup", "--kinds", "exception", "--layers-per-graph", "1", "-1"),
        ("--case", '{"torch_fsdp": true, "tied": false}', "--layers-per-graph", "0", "--stride", "181"),
    ],
    ids=["anywhere", "collectives", "torch's FSDP2"],
)
def test_a_fault_is_an_error_on_every_rank_and_leaves_nothing_behind(tmp_path, options):
    for result in inject_faults(*options, ranks=2, folder=tmp_path, environment={"CUDA_VISIBLE_DEVICES": ""}):
        assert result["problems"] == []
        assert sum(result["attempts"].values()) >= 15
        assert result["passed"] == result["attempts"]
        assert result["replays_at_the_end"] > 0
