"""Casts of shards of parameters to FP8, after an optimizer's step, without the transposes that nobody reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_transposes() -> Iterator[None]:
    """Let TransformerEngine's quantizers with one scale for a tensor cast rows only while this context lasts.

    TransformerEngine (``cast_master_weights_to_fp8``) casts a shard as one row of millions of elements, into a tensor
    that it makes for it, and asks for the transpose too, as GPUs whose FP8 products take transposed operands need it of
    whole parameters. That of a shard is dropped; on Hopper it takes thirty times as long as the cast
    (``docs/performance.md``). Tensors that hold a transpose still get both. Nothing happens without TransformerEngine.
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
