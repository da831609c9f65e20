"""A batch that no rank but one needs is not broadcast."""

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def get_batch_on_this_tp_rank(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor | None]:
    """Return the batch of a micro-batch, broadcast from the first tensor-parallel rank; see megatron-core.

    A rank that is alone in ``broadcast_group`` and reads all of ``batch`` gets it back: each broadcast costs the host
    as much as a collective between ranks does, right before the forward pass.
    """
    given = dict(zip(_parameters(), args, strict=False)) | kwargs
    group = given.get("broadcast_group")
    reads_all = given.get("pipeline_model_parallel_size", 1) == 1 or given.get("mtp_on_this_rank")
    if reads_all and group is not None and group.size() == 1:
        return given["batch"]
    return _upstream.get_batch_on_this_tp_rank(*args, **kwargs)


@functools.cache
def _parameters() -> tuple[str, ...]:
    return tuple(inspect.signature(_upstream.get_batch_on_this_tp_rank).parameters)
