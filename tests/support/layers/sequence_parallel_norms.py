"""Make the norms of Megatron's own layers support sequence parallelism, for which megatron-core requires Apex."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any
from unittest import mock

import torch


@contextmanager
def sequence_parallel_norms() -> Iterator[None]:
    """Context manager that makes torch's norms support ``--sequence-parallel``."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    build = WrappedTorchNorm.__new__

    def built(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        whole = copy(config)
        whole.sequence_parallel = False
        norm = build(cls, whole, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    with mock.patch.object(WrappedTorchNorm, "__new__", built):
        yield
