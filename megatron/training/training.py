"""Training whose host does not wait for the device in steps that print nothing."""

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
    """Add the losses of a step to those since the last line of the log, and print the line; see megatron-core.

    megatron-core makes a tensor on the device of a number in each step, for which the host waits. Here losses are added
    up before, unless the step was skipped or this rank writes them to TensorBoard.

    Args:
        loss_dict: The losses of the step, float32, of no dimension or one element.
        total_loss_dict: Their sums, shape (1,), which are changed in place, and numbers of steps.
    """
    if not skipped_iter and not _writes_losses(iteration):
        for name, loss in loss_dict.items():
            if name not in total_loss_dict:
                total_loss_dict[name] = torch.zeros(1, dtype=torch.float32, device="cuda")
            total_loss_dict[name] = total_loss_dict[name] + loss
        loss_dict = {}
    between = learning_rate, iteration, loss_scale, report_memory_flag, skipped_iter, grad_norm
    return _upstream.training_log(loss_dict, total_loss_dict, *between, *others, **named)


def _writes_losses(iteration: int) -> bool:
    return get_tensorboard_writer() is not None and iteration % get_args().tensorboard_log_interval == 0
