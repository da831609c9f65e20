"""Provide stand-ins for fused weight-gradient kernels on CPU ranks."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.support.stand_ins import fused_weight_gradient_mlp_cuda


@contextmanager
def fused_kernels(as_transformer_engine: bool = True) -> Iterator[None]:
    """Context manager that makes Megatron's linear layers use the stand-ins.

    Args:
        as_transformer_engine: Under Megatron-FSDP, add gradients to ``main_grad`` like TransformerEngine, unless the
            weight has ``overwrite_main_grad``. If False, overwrite ``main_grad`` like Megatron's own code.
    """
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.extensions import transformer_engine
    from megatron.core.tensor_parallel import layers

    kernel: dict[str, Any] = {
        "_grad_accum_fusion_available": True,
        "fused_weight_gradient_mlp_cuda": fused_weight_gradient_mlp_cuda,
    }
    with (
        mock.patch.multiple(layers, create=True, **kernel),
        mock.patch.object(mcore_fsdp_adapter, "is_te_min_version", return_value=True),
        mock.patch.object(transformer_engine, "te_general_gemm", _gemm if as_transformer_engine else None),
    ):
        yield


def _gemm(inputs: torch.Tensor, grads: torch.Tensor, *, out: torch.Tensor, **unused: Any) -> None:
    """Replace ``te_general_gemm``: add the weight gradient to ``out``.

    If the caller's local variable ``weight`` has ``overwrite_main_grad``, overwrite ``out``.
    """
    weight = inspect.currentframe().f_back.f_locals["weight"]  # type: ignore[union-attr]
    product = grads.t() @ inputs
    if getattr(weight, "overwrite_main_grad", False):
        out.copy_(product)
    else:
        out.add_(product)
