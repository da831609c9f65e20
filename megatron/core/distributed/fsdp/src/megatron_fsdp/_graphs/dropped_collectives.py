"""Puts Megatron-FSDP's pipelines back after a capture has failed, without a collective: other ranks may not join it."""

from contextlib import suppress
from typing import Any

from torch.distributed import distributed_c10d

from ..param_and_grad_buffer import BucketStatus


def drop_collectives(fsdp: Any, *, finished: bool = True) -> None:
    """Empty both pipelines: no collective in flight, no gradient bucket in use. Gathered parameters stay gathered.

    Args:
        fsdp: The wrapper.
        finished: Whether collectives in flight will come to an end; those of an abandoned graph never run.
    """
    take_back_unlaunched(fsdp)
    gathers, reductions = fsdp.all_gather_pipeline, fsdp.grad_reduce_pipeline
    for event, count_as_gathered in gathers.param_gather_event_map.values():
        _wait(event, finished)
        count_as_gathered()
    gathers.param_gather_event_map.clear()
    for event, free, _ in reductions.grad_reduce_queue:
        _wait(event, finished)
        free()
    reductions.grad_reduce_queue.clear()
    for bucket in reductions.bucket_status:
        main_grads = reductions.get_fsdp_buffer(bucket)
        if main_grads.is_data_distributed:
            main_grads.free_bucket_storage()
            main_grads.reset_param_main_grad()
            reductions.bucket_status[bucket] = BucketStatus.EMPTY


def take_back_unlaunched(fsdp: Any) -> None:
    """Release the buckets of gathers that failed before they were launched, so that these can be launched again."""
    gathers = fsdp.all_gather_pipeline
    group_of = [gathers.get_fsdp_buffer(bucket).data_parallel_group for bucket in range(gathers.num_buckets)]
    # torch leaves a coalescing context that failed open: nothing in it was launched.
    unlaunched = {group for group in group_of if distributed_c10d._world.pg_coalesce_state.pop(group, None) is not None}
    for key, status in gathers.bucket_status.items():
        if status is not BucketStatus.COMMUNICATING:
            continue
        event, _ = gathers.param_gather_event_map.get(key, (None, None))
        # What calls in the context return; it is replaced once they are launched together.
        if isinstance(event, distributed_c10d._IllegalWork) or (event is None and group_of[key[0]] in unlaunched):
            gathers.param_gather_event_map.pop(key, None)
            gathers.get_fsdp_buffer(*key).free_bucket_storage()
            gathers.bucket_status[key] = BucketStatus.EMPTY
            gathers.bucket_can_be_released[key] = False
        elif event is None:  # to wait for it failed
            gathers.bucket_status[key] = BucketStatus.READY_TO_USE


def _wait(event: Any, finished: bool) -> None:
    if finished:
        with suppress(Exception):  # the connection to a rank that died
            event.wait()
