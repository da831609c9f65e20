"""Collectives within a pass that may fail on a rank: all ranks launch them, or none.

Where ranks agree between passes only, a rank that fails within one leaves the others waiting in its next collective.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core.transformer._cuda_graphs.launches import launches_of


@contextmanager
def joined_collectives(fsdp: Any, join: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Let ``join`` launch all collectives of both pipelines in this context.

    Args:
        fsdp: The wrapper.
        join: Gets what launches collectives. It may call that twice: only what was not launched is launched then.
    """
    gathers, reductions = fsdp.all_gather_pipeline, fsdp.grad_reduce_pipeline
    gather, reduce = gathers.all_gather_params, reductions._bucket_group_gradient_reduce

    def gather_together(*args: Any, **kwargs: Any) -> None:
        join(partial(gather, *args, **kwargs))

    def reduce_together(buckets: list[int], *args: Any, **kwargs: Any) -> None:
        launched: Callable[[], bool] | None = None

        def launch() -> None:
            nonlocal launched
            if launched is None or not launched():
                launched = launches_of(reductions.get_fsdp_buffer(buckets[0]).data_parallel_group)
                reduce(buckets, *args, **kwargs)

        join(launch)

    gathers.all_gather_params, reductions._bucket_group_gradient_reduce = gather_together, reduce_together
    try:
        yield
    finally:
        del gathers.all_gather_params, reductions._bucket_group_gradient_reduce
