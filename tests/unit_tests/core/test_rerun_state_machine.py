"""Ranks agree on whether a step runs again, and do not wait for the work of the step meanwhile."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def machine():
    from megatron.core import rerun_state_machine

    rerun_state_machine.destroy_rerun_state_machine()  # whoever asks for it makes one, in other tests too
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    yield rerun_state_machine.get_rerun_state_machine()
    rerun_state_machine.destroy_rerun_state_machine()


@pytest.mark.parametrize("value", [True, False, [True, False], [False, False, True]])
def test_the_result_is_megatron_cores(machine, value):
    expected = super(type(machine), machine)._reduce_any(value)
    assert machine._reduce_any(value) == expected


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


def test_groups_come_and_go(machine):
    from megatron.core import parallel_state

    for _ in range(2):
        assert machine._reduce_any(True)  # without groups
        parallel_state.initialize_model_parallel()
        assert machine._reduce_any(True)
        parallel_state.destroy_model_parallel()


def test_a_step_runs_once(machine):
    assert machine.should_run_forward_backward(None)
    assert not machine.should_run_forward_backward(None)


def test_a_step_that_is_to_run_again_runs_again(machine):
    assert machine.should_run_forward_backward(None)
    machine.rerun_requested = True
    assert machine.should_run_forward_backward(None)


def test_a_step_that_runs_again_draws_the_same_numbers_from_the_tracker(machine):
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
def test_a_rank_expects_the_others_while_its_step_runs(machine, mode, expects):
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
