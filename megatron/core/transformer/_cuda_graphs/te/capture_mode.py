"""The process while layers or a model are captured."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron.core.token_bounds import token_bounds
from megatron.core.utils import log_single_rank

from .. import state
from ..engine.memory import release_cached_memory, reuse_across_streams

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


def enter_capture_mode() -> None:
    """Release cached memory, and let all of megatron-core know that graphs are captured."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler  # these import this module
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    if MoEAuxLossAutoScaler.main_loss_backward_scale is None:  # before the first step: as schedules will copy to it
        MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1, device="cuda")
    MTPLossAutoScaler.set_loss_scale(MTPLossAutoScaler.main_loss_backward_scale.cuda())
    release_cached_memory()
    if state.FREEZE_GC:
        gc.freeze()
    state._set_capture_start()
    log_single_rank(logger, logging.INFO, "Start CUDA graph capture")


@contextmanager
def capture_mode(enter: Callable[[], float], offloads: bool, reset: Callable[[], None]) -> Iterator[float]:
    """The context of a capture, which ends capture mode also if it fails.

    Args:
        enter: Enters capture mode; returns when it did, as ``time.time()``.
        offloads: Whether activations are offloaded (``fine_grained_activation_offloading``).
        reset: Clears, at the end, what capture accumulated.

    Yields:
        What ``enter`` returned.
    """
    try:
        start = enter()
        with reuse_across_streams(), token_bounds.of_captures():
            yield start
    except BaseException:
        if offloads:
            offload_interface().enable_offload()  # warm-up disables it
        raise
    finally:
        state._set_capture_end()
        if offloads:
            offload_interface().reset()
        if state.FREEZE_GC:
            gc.unfreeze()
        torch.cuda.synchronize()
        reset()


@contextmanager
def outside_capture_mode() -> Iterator[None]:
    """The context, inside a capture, of graphs of several layers: in capture mode these return what graphs of one do.

    Hooks do nothing in that mode.
    """
    state._set_capture_end()
    try:
        yield
    finally:
        state._set_capture_start()


def offload_interface() -> Any:
    """Return the class that offloads activations."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface,
    )

    return FineGrainedActivationOffloadingInterface
