"""Cast parameter shards to FP8 without computing transposes, which are never read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def fp8_quantize(model_params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    """Cast the shards of parameters to FP8; see megatron-core."""
    if model_params:
        with without_transposes():
            _upstream.fp8_quantize(model_params, *args, **kwargs)


@contextmanager
def without_transposes() -> Iterator[None]:
    """Context manager that skips the transposes in TransformerEngine's per-tensor casts.

    ``cast_master_weights_to_fp8`` casts a shard as a single row of millions of elements into a temporary tensor, and
    also computes its transpose, although only whole parameters need one. On Hopper the transpose takes thirty times as
    long as the cast (``docs/results.md``). Tensors that already have a transpose still get both. Does nothing without
    TransformerEngine.
    """
    try:
        from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer
    except ImportError:
        yield
        return
    update_quantized = Float8Quantizer.update_quantized

    def update_rows(self: Any, src: Any, dst: Any, **options: Any) -> Any:
        if not self.columnwise_usage or not self.rowwise_usage or getattr(dst, "_transpose", None) is not None:
            return update_quantized(self, src, dst, **options)
        self.set_usage(columnwise=False)
        try:
            return update_quantized(self, src, dst, **options)
        finally:
            self.set_usage(columnwise=True)

    Float8Quantizer.update_quantized = update_rows
    try:
        yield
    finally:
        Float8Quantizer.update_quantized = update_quantized
