"""Attach gradients before the optimizer step and copy weights after it, with copies planned only once."""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch

from .mixed_precision import is_float8tensor

_LOCAL, _DATA, _ADDRESS = attrgetter("_local_tensor"), attrgetter("data"), methodcaller("data_ptr")
# In elements. torch's allocator aligns each tensor to 512 bytes, and vectorized kernels take a different path for
# unaligned tensors.
_ALIGNMENT = 128


def gradient_name(decoupled: bool) -> str:
    """Return the name of a parameter's gradient attribute; a decoupled gradient may have a different dtype."""
    return "decoupled_grad" if decoupled else "grad"


class OptimizerGradients:
    """The gradients of an optimizer's parameters: shards of the main gradients, or copies cast to a different dtype.

    megatron-core creates views of the shards in every step, and casts each into new memory. This class keeps the views,
    and its casts occupy memory only from ``update`` to ``release``. Parameters without a shard on this rank have no
    gradient.

    Attributes:
        in_place: Whether a graph may read the gradients. If so, they stay attached, at the same addresses.
    """

    def __init__(self, buffer: Any):
        """Manage the gradients that a ``ParamAndGradBuffer`` has attached to the optimizer's parameters."""
        self.in_place = in_place = torch.cuda.is_current_stream_capturing()
        self._name = gradient_name(buffer.use_decoupled_grad)
        self._params = buffer.optimizer_named_parameters
        self._attached: list[tuple[torch.nn.Parameter, Any]] = []
        buffers = []
        cast: list[tuple[Any, Any, torch.Tensor]] = []
        sharded = buffer.bucketing_policy.data_parallel_sharding_strategy != "no_shard"
        for name, param in self._params:
            main_grads = buffer.parameter_groups[buffer.param_to_param_group[param.orig_param]].main_grad_buffer
            if main_grads is None:
                continue
            buffers.append(main_grads)
            grad = buffer.dist_main_grad[name]
            if not grad._local_tensor.numel():  # the optimizer skips it
                continue
            grad.stays = True  # the same object in every step; see ``local_shards.stay``
            self._attached.append((param, grad))
            if grad._local_tensor.dtype != main_grads.data.dtype:
                shard = main_grads.get_item(main_grads.param_idx[param.orig_param], only_shard=sharded)
                cast.append((main_grads, grad, shard))
        self.storages = GradientStorages([] if in_place else [(bucket, grad) for bucket, grad, _ in cast])
        self._grads = [grad for _, grad in self._attached]
        self._locals = [grad._local_tensor for grad in self._grads]
        pairs = ((grad._local_tensor.view(-1), shard) for _, grad, shard in cast)
        self._casts = PlannedCopies(pairs, dict.fromkeys(buffers))

    def unmoved(self, buffer: Any) -> bool:
        """Return whether ``buffer`` still has the same parameters and gradients as at construction.

        Its main gradients must also have the same addresses.
        """
        return (
            self._params is buffer.optimizer_named_parameters
            and self._casts.in_place()
            and all(map(is_, map(_LOCAL, self._grads), self._locals))
        )

    def update(self) -> None:
        """Attach current gradients to all parameters that have a shard on this rank."""
        self.in_place |= torch.cuda.is_current_stream_capturing()
        self.storages.allocate()
        self._casts.run()
        for param, grad in self._attached:
            if getattr(param, self._name, None) is not grad:
                setattr(param, self._name, grad)

    def release(self) -> None:
        """Detach the gradients until ``update`` and free their memory, unless a graph may read them."""
        if self.in_place:
            return
        for param, _ in self._attached:
            setattr(param, self._name, None)
        self.storages.free()


class GradientStorages:
    """Allocates and frees the memory of gradients without replacing the tensors.

    The memory can also be shared permanently with the activations of CUDA graphs, which are all dead when the optimizer
    runs: during a capture, call ``reserve`` before recording the graph that allocates activations, and ``adopt`` after
    recording the graph that frees them. Both do nothing while the memory is in use. Call ``preserve`` before a replay.
    """

    def __init__(self, grads: Iterable[tuple[Hashable, Any]]):
        """Move the local tensors of ``grads``, pairs ``(bucket, DTensor)``, to one storage per bucket and dtype."""
        together: dict[Any, list[Any]] = defaultdict(list)
        for bucket, grad in grads:
            together[bucket, grad._local_tensor.dtype].append(grad)
        self._storages = [_share(alike) for alike in together.values()]
        self._in_use = True
        self._adopted = False

    def allocate(self) -> None:
        """Mark the memory as in use; its contents are undefined unless it was already in use."""
        self._in_use = True
        self._allocate()

    def free(self) -> None:
        """Mark the memory as unused, and free it unless a pool has adopted it."""
        self._in_use = False
        if not self._adopted:
            self._free()

    def reserve(self) -> None:
        """Leave free blocks of the storages' sizes in the pool of the graph being recorded, for its activations."""
        self.detach()
        if not self._in_use:
            self._allocate()
            self._free()

    def adopt(self) -> None:
        """Move the memory to the pool of the graph being recorded."""
        if not self._in_use:
            self._free()
            self._allocate()
            self._adopted = True

    def preserve(self) -> None:
        """Move gradients in use out of the pool that has adopted them, because a replay would overwrite them."""
        if self._adopted and self._in_use:
            self._adopted = False
            for storage, size in self._storages:  # one at a time, for a low peak of memory
                copy = storage.clone()
                storage.resize_(0)
                storage.resize_(size)
                storage.copy_(copy)

    def detach(self) -> None:
        """Undo ``adopt``: free the memory now if it is unused, otherwise at the next ``free``."""
        self._adopted = False
        if not self._in_use:
            self._free()

    def _allocate(self) -> None:
        for storage, size in self._storages:
            if storage.nbytes() != size:
                storage.resize_(size)

    def _free(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)


def _share(grads: list[Any]) -> tuple[torch.UntypedStorage, int]:
    """Move the local tensors of ``grads``, all of one dtype, to a new storage; return it and its size in bytes."""
    first = grads[0]._local_tensor
    sizes = [-(-grad._local_tensor.numel() // _ALIGNMENT) * _ALIGNMENT for grad in grads]
    flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    for grad, part in zip(grads, flat.split(sizes), strict=True):
        old = grad._local_tensor
        grad._local_tensor = part[: old.numel()].view(old.shape).copy_(old)
    storage = flat.untyped_storage()
    return storage, storage.nbytes()


class PlannedCopies:
    """Copies between 1-D tensors with as few launches as possible.

    Consecutive pairs whose sources and destinations are both adjacent in memory are merged.

    Args:
        pairs: Destination and source of each copy, contiguous 1-D views of equal length and any dtype; empty pairs are
            skipped.
        buffers: The ``DataParallelBuffer`` objects that contain the tensors.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], buffers: Iterable[Any]):
        self._calls: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for to, source in pairs:
            if not to.numel():
                continue
            tos, sources = self._calls[to.dtype, source.dtype]
            if tos and _precedes(tos[-1], to) and _precedes(sources[-1], source):
                tos[-1], sources[-1] = _extended(tos[-1], to), _extended(sources[-1], source)
            else:
                tos.append(to)
                sources.append(source)
        self._buffers = list(buffers)
        self._data = [*map(_DATA, self._buffers)]
        self._addresses = [*map(_ADDRESS, self._data)]

    def in_place(self) -> bool:
        """Return whether the data of ``buffers`` has the same addresses as when the copies were planned."""
        return all(map(is_, map(_DATA, self._buffers), self._data)) and [*map(_ADDRESS, self._data)] == self._addresses

    @torch.no_grad()
    def run(self) -> None:
        """Run all copies."""
        for tos, sources in self._calls.values():
            torch._foreach_copy_(tos, sources)


def copies_of_weights(buffer: Any) -> PlannedCopies | None:
    """Plan the copies from the optimizer's weights to the shards of the model's weights after an optimizer step.

    Args:
        buffer: The ``ParamAndGradBuffer`` that contains both.

    Returns:
        The copies, or None if weights are quantized or written to parameters instead of buffers.
    """
    pairs, buffers = [], []
    for group in buffer.parameter_groups:
        main, model = group.main_weight_buffer, group.model_weight_buffer
        if main is None:
            continue
        if model is None or group.transpose_weight_buffer is not None or any(map(is_float8tensor, group.params)):
            return None
        buffers += [main, model]
        only_shard = main.is_data_distributed or model.is_data_distributed
        for item in map(main.param_idx.__getitem__, group.params):
            # .data: the copy must not bump the version counters of parameters that are views of the buffer
            to = model.get_item(item, only_shard=only_shard).data
            pairs.append((to, main.get_item(item, only_shard=only_shard)))
    return PlannedCopies(pairs, buffers)


def _precedes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.storage_offset() + first.numel() == second.storage_offset()
    )


def _extended(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first.as_strided((first.numel() + second.numel(),), (1,))
