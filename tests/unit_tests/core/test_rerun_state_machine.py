"""Test reruns of a step: host agreement, random numbers, and validation of results after the passes."""

import math
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def machine():
    from megatron.core import rerun_state_machine

    rerun_state_machine.destroy_rerun_state_machine()  # other tests may have created one
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    yield rerun_state_machine.get_rerun_state_machine()
    rerun_state_machine.destroy_rerun_state_machine()


@pytest.mark.parametrize("value", [True, False, [True, False], [False, False, True]])
def test_hosts_agree_without_the_device(machine, value):
    from megatron.core import parallel_state

    expected = super(type(machine), machine)._reduce_any(value)
    parallel_state.initialize_model_parallel()
    try:
        with mock.patch.object(dist, "all_reduce", side_effect=AssertionError):
            assert machine._reduce_any(value) == expected
    finally:
        parallel_state.destroy_model_parallel()


def test_rerun_draws_the_same_random_numbers(machine):
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    def draw():
        with get_cuda_rng_tracker().fork():
            return torch.rand(4, device="cuda")

    model_parallel_cuda_manual_seed(
        1, use_cudagraphable_rng=True, force_reset_rng=True, tp_rank=0, ep_rank=0, etp_rank=0
    )
    assert machine.should_run_forward_backward(None)
    first = draw()
    machine.rerun_requested = True
    assert machine.should_run_forward_backward(None)
    assert draw().equal(first)
    assert not draw().equal(first)


@pytest.mark.parametrize(("mode", "expects"), [("VALIDATE_RESULTS", [True, False]), ("DISABLED", [False, False])])
def test_agreement_is_prepared_while_the_step_runs(machine, mode, expects):
    from megatron.core import host_agreement, parallel_state, rerun_state_machine

    machine.mode = rerun_state_machine.RerunMode[mode]
    parallel_state.initialize_model_parallel()
    try:
        with mock.patch.object(host_agreement.HostAgreement, "expect") as expect:
            for runs, expected in zip((True, False), expects, strict=True):
                assert machine.should_run_forward_backward(None) == runs
                assert expect.called == expected
                expect.reset_mock()
    finally:
        parallel_state.destroy_model_parallel()


LARGE = "unexpectedly large"


@pytest.fixture
def validate(machine):
    """Return a function that validates losses like pretrain_gpt.py, after a completed first step."""

    def validate(*values, of=machine):
        for value in values:
            loss = torch.tensor(float(value), device="cuda")
            for rejects in (torch.isnan, torch.isinf):
                of.validate_result(loss, rejects, rejects.__name__, tolerance=0.0, fatal=True)
            spiky = partial(of.is_unexpectedly_large, threshold=10, context="loss", num_samples=2)
            of.validate_result(loss, spiky, LARGE, tolerance=0.0, fatal=False)
            loss /= 3  # as schedules do

    machine.should_checkpoint_and_exit()
    return validate


def test_validation_does_not_synchronize_before_the_passes(machine, validate):
    assert machine.should_run_forward_backward(None)
    with (
        mock.patch.object(torch.cuda.Event, "synchronize") as wait,
        mock.patch.object(type(machine), "is_unexpectedly_large") as ask,
        mock.patch.object(torch, "isnan", side_effect=AssertionError),
    ):
        ask.return_value = False
        loss = torch.tensor(1.0, device="cuda")
        machine.validate_result(loss, torch.isnan, "NaN")
        machine.validate_result(loss, partial(machine.is_unexpectedly_large, threshold=10, context="loss"), LARGE)
        assert not wait.called
        assert not ask.called


@pytest.mark.parametrize(
    ("values", "message", "sequence"),
    [
        ([math.nan], "isnan", 1),
        ([1, 2, math.nan, math.inf], "isnan", 3),
        ([1, -math.inf], "isinf", 2),
        ([1, 2, 20, math.nan], LARGE, 3),
        ([1, 2, 19], None, None),
    ],
)
def test_wrong_results_are_found_as_in_megatron_core(machine, validate, values, message, sequence):
    from megatron.core import rerun_state_machine

    cores = rerun_state_machine._upstream.RerunStateMachine(mode=machine.mode)
    cores.should_checkpoint_and_exit()
    runs = []
    for each in (machine, cores):
        assert each.should_run_forward_backward(None)
        validate(*values, of=each)
        runs.append(each.should_run_forward_backward(None))
    assert runs == [message is not None] * 2
    assert machine.failed_validation_call == cores.failed_validation_call
    if message:
        assert (machine.failed_validation_call.caller.message, machine.failed_validation_call.sequence) == (
            message,
            sequence,
        )
    assert (machine.max_values, machine.large_value_counts) == (cores.max_values, cores.large_value_counts)


def test_other_rejection_functions_run_at_once(machine, validate):
    assert machine.should_run_forward_backward(None)
    asks = mock.Mock(return_value=True)
    machine.validate_result(torch.tensor(1.0, device="cuda"), asks, "another")
    asks.assert_called_once()
    assert machine.failed_validation_call.caller.message == "another"


def test_wrong_result_without_reruns_is_an_error(machine, validate):
    from megatron.core import rerun_state_machine

    machine.set_mode(rerun_state_machine.RerunMode.DISABLED)
    assert machine.should_run_forward_backward(None)
    with pytest.raises(RuntimeError, match=r"Unexpected result nan.*isnan"):
        validate(math.nan)
