"""Accumulate losses without synchronizing in steps that do not log."""

from typing import TYPE_CHECKING, Any

import torch

from megatron.training.global_vars import get_args, get_tensorboard_writer
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def training_log(
    loss_dict: dict[str, torch.Tensor],
    total_loss_dict: dict[str, Any],
    learning_rate: float | None,
    iteration: int,
    loss_scale: float,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: float | torch.Tensor | None,
    *others: Any,
    **named: Any,
) -> Any:
    """Accumulate the losses of a step and log them at the log interval; see megatron-core.

    megatron-core synchronizes for each loss by creating a GPU tensor from a Python number. This function accumulates
    the losses itself unless the step was skipped or this rank writes them to TensorBoard.

    Args:
        loss_dict: The losses of the step, float32, one element each.
        total_loss_dict: The accumulated losses, shape (1,), and step counts; modified in place.
    """
    writes_losses = get_tensorboard_writer() is not None and iteration % get_args().tensorboard_log_interval == 0
    if not skipped_iter and not writes_losses:
        for name, loss in loss_dict.items():
            if name not in total_loss_dict:
                total_loss_dict[name] = torch.zeros(1, dtype=torch.float32, device="cuda")
            total_loss_dict[name] = total_loss_dict[name] + loss
        loss_dict = {}
    first = learning_rate, iteration, loss_scale, report_memory_flag, skipped_iter, grad_norm
    return _upstream.training_log(loss_dict, total_loss_dict, *first, *others, **named)
