"""The process while layers or a model are captured, and what is cleared afterwards."""

import gc
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.utils import log_single_rank

from .. import state
from ..engine.memory import release_cached_memory
from .capture_observer import CaptureObserver

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


class EntersCaptureMode:
    """The part of ``TECudaGraphHelper`` that enters capture mode and leaves it."""

    model: Sequence[Any]
    config: Any
    optimizers: Sequence[Any]
    _observer: CaptureObserver

    def _start_capturing(self) -> float:
        """Enter capture mode; return ``time.time()``."""
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler  # imports this module

        if MoEAuxLossAutoScaler.main_loss_backward_scale is None:  # before the first step: as schedules will copy to it
            MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1, device="cuda")
        release_cached_memory(thorough=True)
        if state.FREEZE_GC:
            gc.freeze()
        state._set_capture_start()
        log_single_rank(logger, logging.INFO, "Start CUDA graph capture")
        self._observer.start()
        return time.time()

    def _leave_capture_mode(self) -> None:
        state._set_capture_end()
        if self.config.fine_grained_activation_offloading:
            offload_interface().reset()
        if state.FREEZE_GC:
            gc.unfreeze()
        torch.cuda.synchronize()
        self._reset_after_capture()

    def _reset_after_capture(self) -> None:
        """Zero what capture accumulated: gradients, and metrics and token counts of MoE layers."""
        from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        for chunk in self.model:
            chunk.zero_grad_buffer()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        get_moe_metrics_tracker().clear()
        reset_model_temporary_tensors(self.config, self.model)


def offload_interface() -> Any:
    """Return the class that offloads activations."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface,
    )

    return FineGrainedActivationOffloadingInterface
