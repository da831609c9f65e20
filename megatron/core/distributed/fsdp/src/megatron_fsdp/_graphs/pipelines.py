"""Define training states of modules, and prepare and clean up Megatron-FSDP's pipelines around a capture.

Pipelines are emptied before and after a capture, and restored if it fails. Restoring them launches no collective,
because other ranks may not take part.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from functools import wraps
from typing import Any, Literal

import torch
from torch.distributed import distributed_c10d

from ..param_and_grad_buffer import BucketStatus

Direction = Literal["forward", "backward"]

# Appended to errors about buffers whose address changed.
ADVICE = (
    "set --fsdp-double-buffer and --fsdp-db-use-persist-buf-on-alloc-fail to keep buffers in place; if "
    "both are set, the order of all-gathers changed (a unit ran out of turn, for example)"
)


class TrainingState(Enum):
    """State of a module in a training step, stored in its ``_training_state``."""

    FORWARD = auto()
    PRE_BACKWARD = auto()  # parameters are gathered for backward, or the forward pass is being recomputed
    POST_BACKWARD = auto()
    IDLE = auto()


def set_training_state(modules: Iterable[torch.nn.Module], state: TrainingState) -> None:
    """Set the ``_training_state`` of ``modules``."""
    for module in modules:
        module.__dict__["_training_state"] = state  # bypasses Module.__setattr__, which is slow


def shown_in_profiles[**P, R](phase: Callable[P, R]) -> Callable[P, R]:
    """Decorate the method ``phase`` to record a profiler range with its name and the name of the module.

    The module is the first argument, or ``self.module`` if there are no arguments.
    """

    @wraps(phase)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.autograd._profiler_enabled():
            return phase(*args, **kwargs)
        owner: Any = args[0]
        module = args[1] if len(args) > 1 else getattr(owner, "module", None)
        name = owner.module_names.get(module, "")
        with torch.profiler.record_function(f"FSDP::{phase.__name__} ({name})"):
            return phase(*args, **kwargs)

    return run


@contextmanager
def prepared(fsdp: Any) -> Iterator[None]:
    """Context manager in which the model has raw parameters, no unit is gathered and no collective is in flight.

    On exit, even after an exception, all gathered parameters are released, and the model has its previous parameters
    again (raw, or the optimizer's ``DTensor``). Parameters outside of units keep their memory and values.
    """
    distributed = fsdp.is_param_fsdp_distributed
    try:
        fsdp._replace_param_with_raw_if_needed()
        release_all(fsdp)
        yield
    except BaseException:
        drop_collectives(fsdp)
        raise
    finally:
        try:
            release_captured(fsdp)
        finally:
            if distributed:
                fsdp._replace_param_with_distributed_if_needed()


def take_places(fsdp: Any) -> None:
    """Assign to each double-buffered bucket the address that it has in training.

    A bucket keeps the address of its first allocation. In training, neighboring units are in use together and alternate
    between the two buffers. A capture before the first step would assign different addresses, because it may run only
    some units and reduces buckets one at a time. No bucket may be in use.
    """
    if not fsdp.ddp_config.fsdp_double_buffer:
        return
    gathers, reductions = fsdp.all_gather_pipeline, fsdp.grad_reduce_pipeline
    units: defaultdict[int, list[int]] = defaultdict(list)
    for bucket, group in enumerate(fsdp.param_and_grad_buffer.parameter_groups):
        if group.fsdp_unit_id is not None:
            units[group.fsdp_unit_id].append(bucket)
    in_order = list(units.values())
    for backward in (False, True):  # weights, then their transposes, if any
        take_in_turn([[gathers.get_fsdp_buffer(bucket, backward) for bucket in unit] for unit in in_order])
    with_grads = map(reductions.with_grads, reversed(in_order))
    dtype = reductions.buffer.mp_policy.grad_comm_dtype
    take_in_turn([[reductions.get_fsdp_buffer(bucket) for bucket in unit] for unit in with_grads], dtype)


def take_in_turn(units: Iterable[Iterable[Any]], dtype: torch.dtype | None = None) -> None:
    """Allocate the sharded buckets of each unit in order; free a unit's buckets after allocating the next unit's.

    Args:
        units: The buffers of each unit.
        dtype: Dtype of the buckets; None for each buffer's own.
    """
    before: list[Any] = []
    for unit in [*units, ()]:
        sharded = [buffer for buffer in unit if buffer.is_data_distributed]
        for buffer in sharded:
            buffer.fetch_bucket(dtype=dtype)
        for buffer in before:
            buffer.free_bucket_storage()
        before = sharded


def release_captured(fsdp: Any) -> None:
    """Reset gradients and training states after a capture or a failed pass, and release gathered parameters."""
    for param in fsdp.raw_param.values():
        param.grad = None  # a failed backward pass may have left some
        param.grad_added_to_main_grad = False
    set_training_state(fsdp.module.modules(), TrainingState.IDLE)
    release_all(fsdp)


def release_all(fsdp: Any) -> None:
    """Wait for collectives in flight, and release every unit's parameters."""
    fsdp.all_gather_pipeline.release_gathered()
    fsdp.grad_reduce_pipeline.wait_for_previous_grad_reduce(0)


def free_gradients(fsdp: Any, buckets: Iterable[int]) -> None:
    """Free the memory of gradient ``buckets``, discarding their contents."""
    reductions = fsdp.grad_reduce_pipeline
    for bucket in reductions.bucket_status.keys() & buckets:
        main_grads = reductions.get_fsdp_buffer(bucket)
        if main_grads.is_data_distributed:
            main_grads.free_bucket_storage()
            main_grads.reset_param_main_grad()
            reductions.bucket_status[bucket] = BucketStatus.EMPTY


def drop_collectives(fsdp: Any, *, finished: bool = True) -> None:
    """Empty both pipelines, so that no collective is in flight and no gradient bucket in use; keep gathered parameters.

    Args:
        finished: Whether to wait for collectives in flight; False for collectives of an abandoned graph, which never
            run.
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
    for ready in reductions.bucket_grad_ready_params:
        ready.clear()
    free_gradients(fsdp, reductions.bucket_status)


def take_back_unlaunched(fsdp: Any) -> None:
    """Release the buckets of all-gathers that failed before launch, so that they can be gathered again."""
    gathers = fsdp.all_gather_pipeline
    buffers = {key: buffer for key in gathers.bucket_status if (buffer := gathers.get_fsdp_buffer(*key)) is not None}
    group_of = {key: buffer.data_parallel_group for key, buffer in buffers.items()}
    # After a failure torch leaves the coalescing context open; nothing in it was launched.
    unlaunched = {
        group for group in group_of.values() if distributed_c10d._world.pg_coalesce_state.pop(group, None) is not None
    }
    for key, buffer in buffers.items():
        if gathers.bucket_status[key] is not BucketStatus.COMMUNICATING:
            continue
        event, _ = gathers.param_gather_event_map.get(key, (None, None))
        # Inside that context, calls return a placeholder until all are launched together.
        if isinstance(event, distributed_c10d._IllegalWork) or (event is None and group_of[key] in unlaunched):
            gathers.param_gather_event_map.pop(key, None)
            buffer.free_bucket_storage()
            gathers.bucket_status[key] = BucketStatus.EMPTY
            gathers.bucket_can_be_released[key] = False
        elif event is None:  # the wait failed
            gathers.bucket_status[key] = BucketStatus.READY_TO_USE


def _wait(event: Any, finished: bool) -> None:
    if finished:
        with suppress(Exception):  # the peer may have died
            event.wait()
