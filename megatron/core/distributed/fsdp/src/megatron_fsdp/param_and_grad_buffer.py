"""Megatron-FSDP's buffers and pipelines, with a data race of double buffering fixed.

Everything else in this module is megatron-core's.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


class GradReducePipeline(_upstream.GradReducePipeline):
    """megatron-core's ``GradReducePipeline`` whose double buffer is not written while a reduction still reads it."""

    def _enforce_double_buffer_limit(self, add_buckets: Iterable[int]) -> None:
        """Release gradient buckets for ``add_buckets``, and let the current stream wait for their reductions.

        megatron-core releases a bucket as soon as its reduction is queued, and only the reduction stream waits for its
        end. The current stream, which runs ahead, then writes the next unit's gradients to that bucket.
        """
        queued = list(self.grad_reduce_queue)
        super()._enforce_double_buffer_limit(add_buckets)
        for reduced, *_ in queued[: len(queued) - len(self.grad_reduce_queue)]:
            reduced.wait()
