"""Disable the collectives of Megatron-FSDP, to time computation alone."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor")


class _Done:
    """A finished collective."""

    def wait(self, *_: Any, **__: Any) -> bool:
        return True


@contextmanager
def without_collectives() -> Iterator[None]:
    """While in this context, disable all-gathers of parameters and reductions of gradients.

    Requires the sharding strategy ``optim``, with which each rank holds all parameters and gradients. With several
    ranks, parameters in other ranks' shards keep their initial values, so only the first loss is correct.
    """

    def nothing(*_: Any, async_op: bool = False, **__: Any) -> _Done | None:
        return _Done() if async_op else None

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(torch.distributed, name, nothing))
        yield
