"""Profiles show what Megatron-FSDP's hooks do, by phase and module."""

from unittest import mock

import pytest
import torch

from .fsdp_variants import Variant, run_backward, small

CASE = small()


@pytest.fixture(scope="module")
def fsdp(ranks):
    return Variant(CASE).build().module


def shown(fsdp):
    """The names of the ranges of FSDP that a profile of one micro-batch shows."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run_backward(fsdp, CASE)
    fsdp.finish_grad_sync()
    return {event.name for event in profile.events() if event.name.startswith("FSDP::")}


@pytest.mark.parametrize(
    "phase", ["unshard_for_forward", "release_after_forward", "unshard_for_backward", "release_after_backward"]
)
def test_every_phase_of_a_unit_is_shown_with_its_module(fsdp, phase):
    names = shown(fsdp)
    assert {f"FSDP::{phase} (decoder.layers.{i})" for i in range(CASE.layers)} <= names


def test_the_frame_of_the_models_backward_is_shown(fsdp):
    assert {"FSDP::start_backward ()", "FSDP::finish_backward ()"} <= shown(fsdp)


def test_without_a_profiler_no_range_is_opened(fsdp):
    with mock.patch("torch.profiler.record_function", side_effect=AssertionError("no profiler runs")):
        run_backward(fsdp, CASE)
    fsdp.finish_grad_sync()
