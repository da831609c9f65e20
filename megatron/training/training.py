"""Training whose host does not wait for the device in steps that print nothing.

Everything else in this module is megatron-core's.
"""

import inspect
from typing import TYPE_CHECKING, Any

import torch

from megatron.training.global_vars import get_args, get_tensorboard_writer
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


_LOG = inspect.signature(_upstream.training_log)


def training_log(*args: Any, **kwargs: Any) -> Any:
    """Add the losses of a step to those since the last line of the log, and print the line; see megatron-core.

    megatron-core makes a tensor on the device of a number in each step, for which the host waits. Here losses are added
    up before, unless the step was skipped or this rank writes them to TensorBoard.
    """
    given = _LOG.bind(*args, **kwargs).arguments
    if not given["skipped_iter"] and not _writes_losses(given["iteration"]):
        sums = given["total_loss_dict"]
        for name, loss in given["loss_dict"].items():
            if name not in sums:
                sums[name] = torch.zeros(1, dtype=torch.float32, device="cuda")
            sums[name] = sums[name] + loss
        given["loss_dict"] = {}
    return _upstream.training_log(**given)


training_log.__signature__ = _LOG  # type: ignore[attr-defined]


def _writes_losses(iteration: int) -> bool:
    return get_tensorboard_writer() is not None and iteration % get_args().tensorboard_log_interval == 0
