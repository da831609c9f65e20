"""Megatron-FSDP's buffers and pipelines, with a data race of double buffering closed.

Everything else of megatron-core's module of this path is megatron-core's own.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


if TYPE_CHECKING:  # names that are megatron-core's own

    def __getattr__(name: str) -> Any: ...


class GradReducePipeline(_upstream.GradReducePipeline):
    """megatron-core's ``GradReducePipeline`` whose double buffer is not written while a reduction still reads it."""

    def _enforce_double_buffer_limit(self, add_buckets: Iterable[int]) -> None:
        """Give back the gradient buckets that ``add_buckets`` need, and let the current stream wait for them.

        megatron-core gives a bucket back as soon as its reduction is queued, and lets only the reduction stream wait
        for its end. The next unit's gradients are written to that bucket by the current stream, which runs ahead.
        """
        queued = list(self.grad_reduce_queue)
        super()._enforce_double_buffer_limit(add_buckets)
        for reduced, *_ in queued[: len(queued) - len(self.grad_reduce_queue)]:
            reduced.wait()
