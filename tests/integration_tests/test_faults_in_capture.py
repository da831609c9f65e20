"""Captures that fail, on one rank or on both, leave nothing behind: no rank waits, and training goes on bit for bit.

A sample of the places where they can fail. For all of them run
``tests/support/trainings/inject_faults.py`` with no ``--stride``.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import Trained
from tests.support.trainings.launch import inject_faults, name_of

PLACES = {
    "anywhere": ("--stride", "401", "--holds", "decoder", "layer", "model"),
    "somewhere": ("--stride", "503", "--holds", "decoder"),
    "torch's FSDP2": ("--case", '{"torch_fsdp": true, "tied": false}', "--holds", "decoder", "--stride", "181"),
    "tensor parallel": ("--tp", "2", "--stride", "301", "--holds", "layer", "model"),
    "instances": (*("--case", '{"instances": 2, "outer": "optim"}', "--stride", "301", "--holds", "decoder", "model"),),
    "expert parallel": (
        *("--ep", "2", "--case", '{"experts": 4, "capacity": 1.0}', "--holds", "layer", "--stride", "301"),
    ),
}
QUICK = ("somewhere", "torch's FSDP2")
# Layers that communicate in warm-up: on two tensor-parallel ranks, in attention and in the MLP.
BETWEEN_COLLECTIVES: list[dict[str, Any]] = [
    {"control": f"failed_{phase}_between_collectives", "holds": layers, "dropout": 0.1, "steps": 6}
    for phase in ("forward", "backward")
    for layers in ("layer", "model")
]
FOR_EVALUATION: list[dict[str, Any]] = [
    {"control": "failed_warm_up_for_evaluation", "evaluates": True, "holds": "model", "steps": 6}
]
INTERRUPTED: list[dict[str, Any]] = [
    {"control": "interrupted_on_one_rank", "holds": layers, "dropout": 0.1, "steps": 6}
    for layers in ("model", "decoder", "layer")
]


@pytest.mark.parametrize(
    "options",
    [pytest.param(each, id=name, marks=[] if name in QUICK else pytest.mark.long) for name, each in PLACES.items()],
)
def test_a_fault_is_an_error_on_every_rank_and_leaves_nothing_behind(tmp_path, options):
    for result in inject_faults(*options, ranks=2, folder=tmp_path, environment={"CUDA_VISIBLE_DEVICES": ""}):
        assert result["problems"] == []
        assert sum(result["attempts"].values()) >= 15
        assert result["passed"] == result["attempts"]
        assert result["replays_at_the_end"] > 0


@pytest.mark.parametrize("case", mostly_long(INTERRUPTED, INTERRUPTED[0]), ids=name_of)
def test_an_interrupt_on_one_rank_ends_a_capture_on_all(compare_runs, case):
    (result,) = compare_runs([case])
    assert not result["error"]
    assert result["differences"] == []
    assert result["replays"] > 0


@pytest.fixture(scope="module")
def between_collectives(compare_runs):
    """The result of each case, by its name."""
    return Trained([*BETWEEN_COLLECTIVES, *FOR_EVALUATION], compare_runs, {}, "--tp", "2")


@pytest.mark.parametrize("case", mostly_long(BETWEEN_COLLECTIVES, BETWEEN_COLLECTIVES[3]), ids=name_of)
def test_a_rank_that_fails_in_warm_up_between_collectives_of_a_layer_leaves_no_other_waiting(between_collectives, case):
    result = between_collectives[name_of(case)]
    assert not result["error"]
    assert result["differences"] == []
    assert result["replays"] == 0


@pytest.mark.parametrize("case", FOR_EVALUATION, ids=name_of)
def test_nor_does_one_that_fails_so_when_evaluation_captures(between_collectives, case):
    result = between_collectives[name_of(case)]
    assert not result["error"]
    assert result["differences"] == []
    assert result["evaluation_replays"] == [0]
    assert result["replays"] > 0
