"""Test that profiles show Megatron-FSDP's hooks by phase and module."""

from unittest import mock

import pytest
import torch

from .fsdp_variants import Variant, run_backward, small

CASE = small()


@pytest.fixture(scope="module")
def fsdp(ranks):
    return Variant(CASE).build().module


def shown(fsdp):
    """Profile one micro-batch, and return the names of its FSDP ranges."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run_backward(fsdp, CASE)
    fsdp.finish_grad_sync()
    return {event.name for event in profile.events() if event.name.startswith("FSDP::")}


def test_profiles_show_each_phase_of_a_unit(fsdp):
    phases = "unshard_for_forward", "release_after_forward", "unshard_for_backward", "release_after_backward"
    assert {f"FSDP::{phase} (decoder.layers.{i})" for phase in phases for i in range(CASE.layers)} <= shown(fsdp)


def test_no_range_without_a_profiler(fsdp):
    with mock.patch("torch.profiler.record_function", side_effect=AssertionError("no profiler runs")):
        run_backward(fsdp, CASE)
    fsdp.finish_grad_sync()
