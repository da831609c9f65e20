"""Test token bounds: the overflow flag, saved statistics, and repeated steps."""

import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.transformer._cuda_graphs.snapshot import replays

FACTOR = 1.25

pytestmark = pytest.mark.usefixtures("process_group")


class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(moe_alltoall_capacity_factor=FACTOR)
        self.register_buffer("tokens", torch.arange(4.0))


@pytest.fixture
def router():
    return Router()


@pytest.fixture
def model():
    return torch.nn.Module()  # has graphs


@pytest.fixture
def bounds(router, model):
    from megatron.core import token_bounds

    made = token_bounds.TokenBounds()
    made.add(router)
    made.models.add(model)
    with mock.patch.object(token_bounds, "token_bounds", made):
        yield made


@pytest.fixture
def machine(bounds):
    from megatron.core import rerun_state_machine

    rerun_state_machine.destroy_rerun_state_machine()
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    with mock.patch.object(rerun_state_machine, "token_bounds", bounds):
        yield rerun_state_machine.get_rerun_state_machine()
    rerun_state_machine.destroy_rerun_state_machine()


def run(bounds, *microbatches):
    """Emulate the passes of a step; ``microbatches`` are the overflow flags of its micro-batches."""
    for too_many in microbatches:
        bounds.note(torch.tensor([False, too_many]))
        bounds.copy_to_host()


@pytest.mark.parametrize("microbatches", [[True], [False, True], [True, False]], ids=str)
def test_overflow_of_a_microbatch_is_read_after_the_step(bounds, microbatches):
    bounds.begin()
    run(bounds, *microbatches)
    assert bounds.exceeded()


def test_next_step_or_training_ends_a_suspension(bounds):
    from megatron.core import rerun_state_machine

    for _ in range(2):  # the first step ends with an exception
        bounds.begin()
        assert bounds.in_force and not replays.suspended_by
        bounds.lift()
    with mock.patch.object(rerun_state_machine, "token_bounds", bounds):
        rerun_state_machine.RerunStateMachine()
    assert not bounds and not bounds.in_force
    assert not replays.suspended_by


def test_capture_is_deferred_until_a_step_fits(machine, bounds, caplog):
    bounds.models.clear()
    for number in range(11):
        assert machine.should_run_forward_backward(None)
        assert not bounds.in_force
        for load in (3.14159 - number, 0.5):
            bounds.note_load(load)
        run(bounds, number < 10)
        assert not machine.should_run_forward_backward(None)
        bounds.note_load(7.0)  # evaluation
        assert bounds.defers_capture() is (number < 10)
    assert [re.findall(r"rank (\S+) times.* 1.25: .*raise", text) for text in caplog.messages] == [["3.14"], ["0.50"]]


@pytest.mark.parametrize(
    ("factor", "in_force", "rows_per_peer", "exceeded"),
    [(1.5, False, 5, False), (1.0, False, 5, True), (1.5, True, 6, False), (1.0, True, 4, True)],
)
def test_only_graphs_limit_rows(bounds, monkeypatch, factor, in_force, rows_per_peer, exceeded):
    from megatron.core.transformer.moe import token_dispatcher

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    monkeypatch.setattr(token_dispatcher, "token_bounds", bounds)
    monkeypatch.setattr(dispatcher.__base__, "token_dispatch", lambda _, *rows: rows)
    sender = object.__new__(dispatcher)
    sender.__dict__.update(
        config=mock.Mock(moe_alltoall_capacity_factor=factor, moe_router_topk=2), num_local_experts=2
    )
    sender.__dict__.update(ep_size=2, ep_group=None, input_splits=torch.tensor([5, 3]))
    sender.num_global_tokens_per_local_expert = torch.tensor([[3, 2], [2, 1]])
    bounds.begin()
    bounds.in_force = in_force
    rows, _ = sender.token_dispatch(torch.ones(8, 4), torch.ones(8))
    assert (len(rows), bounds.exceeded()) == (2 * rows_per_peer, exceeded)


def test_loop_without_repeated_steps_is_refused(bounds):
    with pytest.raises(RuntimeError, match=r"--moe-alltoall-capacity-factor .*should_run_forward_backward"):
        bounds.copy_to_host()


def test_statistics_are_restored_in_place(bounds, router):
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    metrics: dict[str, Any] = {}
    losses = {"loss_values": torch.full((2,), 5.0), "reduce_group": None}
    with (
        mock.patch.object(get_moe_metrics_tracker(), "_metrics", metrics),
        mock.patch.object(MTPLossLoggingHelper, "tracker", losses),
    ):
        get_moe_metrics_tracker().record("old", torch.tensor(3.0), 1, 2)
        bounds.save_statistics()
        place = router.tokens.data_ptr()
        router.tokens += 1
        losses["loss_values"] += 1
        for name in ("old", "new"):
            get_moe_metrics_tracker().record(name, torch.tensor(7.0), 2, 2)
        bounds.restore_statistics()
        assert metrics["old"].values.tolist() == [3.0, 0.0]
        assert metrics["new"].values.tolist() == [0.0, 0.0]
    assert losses["loss_values"].tolist() == [5.0, 5.0]
    assert router.tokens.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert router.tokens.data_ptr() == place


def test_overflowing_step_repeats_with_room_for_all(machine, bounds, router, caplog):
    for _ in range(11):
        assert machine.should_run_forward_backward(None)
        assert bounds.in_force
        run(bounds, True)
        router.tokens += 1
        assert machine.should_run_forward_backward(None)
        assert replays.suspended_by and not bounds.in_force
        assert router.tokens.tolist() == [0.0, 1.0, 2.0, 3.0]
        run(bounds, False)
        assert not machine.should_run_forward_backward(None)
        assert not replays.suspended_by
        assert machine.should_checkpoint_and_exit() == (False, False, 0)
    messages = [re.findall(r" 1.25 allows.* (\d+ of \d+) steps have been rerun", text) for text in caplog.messages]
    assert messages == [["1 of 1"], ["10 of 10"]]


def test_wrong_result_counts_in_the_repeated_step_only(machine, bounds, router):
    def validate(value):
        machine.validate_result(torch.tensor(value), torch.isnan, "found NaN", fatal=True)

    machine.should_checkpoint_and_exit()  # nothing is validated before a first step has ended
    assert machine.should_run_forward_backward(None)
    validate(float("nan"))
    run(bounds, True)
    assert machine.should_run_forward_backward(None)
    assert not machine.validation_counts
    validate(float("nan"))
    run(bounds, False)
    assert machine.should_run_forward_backward(None)  # to see whether the NaN can be reproduced
    assert replays.suspended_by
    assert machine.state == type(machine.state).RERUNNING_IN_PLACE
