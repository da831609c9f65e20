"""Stand-ins for TransformerEngine's projections, which latent MoE layers (--moe-latent-size) require."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


class Projection(torch.nn.Linear):
    """Replaces TransformerEngine's linear layer; every tensor-parallel rank holds the whole weight."""

    def __init__(
        self, size: int, output_size: int, *, config: Any, init_method: Callable, bias: bool, **_: Any
    ) -> None:
        super().__init__(size, output_size, bias, dtype=config.params_dtype)
        init_method(self.weight)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


@contextmanager
def latent_projections() -> Iterator[None]:
    """Context manager that builds latent MoE layers without TransformerEngine."""
    from megatron.core.transformer.moe import moe_layer

    with mock.patch.multiple(moe_layer, HAVE_TE=True, TELinear=Projection):
        yield
