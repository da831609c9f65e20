"""Training without the collectives of Megatron-FSDP, to time what the device computes alone."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor")


class _Done:
    """A collective that moves nothing and is over."""

    def wait(self, *_: Any, **__: Any) -> bool:
        return True


@contextmanager
def without_collectives() -> Iterator[None]:
    """Let parameters not be gathered and gradients not be reduced in the context.

    Meant for the sharding strategy ``optim``, where parameters and gradients lie whole on each rank: they are then read
    and written as in a training with collectives. With more than one rank parameters of other ranks' shards keep their
    first values, so that only the first step's loss is that of a training.
    """

    def nothing(*_: Any, async_op: bool = False, **__: Any) -> _Done | None:
        return _Done() if async_op else None

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(torch.distributed, name, nothing))
        yield
