"""Memory for gradients in another dtype than the main gradients, there only while the optimizer needs it."""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

import torch

# In elements: torch's allocator starts each tensor at a multiple of 512 bytes, and kernels that load several elements
# at once take another path for tensors that start elsewhere.
_ALIGNMENT = 128


class GradientStorages:
    """The storages of gradients, whose memory comes and goes while the tensors stay the same objects.

    The memory may also stay for good among the activations of CUDA graphs, all of which are dead when the optimizer
    runs: ``leave_room`` is called before the graph is recorded that allocates them, ``settle`` when the graph has been
    recorded that frees them, both within the capture. They do nothing while the memory is in use.
    """

    def __init__(self, grads: Iterable[tuple[Hashable, Any]]):
        """Move the local tensors of gradients to shared storages.

        Args:
            grads: For each gradient, a ``DTensor``, the bucket it comes from; those of a bucket share a storage.
        """
        together: dict[Any, list[Any]] = defaultdict(list)
        for bucket, grad in grads:
            together[bucket, grad._local_tensor.dtype].append(grad)
        self._storages = [_share(alike) for alike in together.values()]
        self._in_use = True
        self._settled = False

    def allocate(self) -> None:
        """Use the memory; what is in it is undefined if it was not in use."""
        self._in_use = True
        self._allocate()

    def free(self) -> None:
        """Use the memory no longer, and give it back unless it has settled."""
        self._in_use = False
        if not self._settled:
            self._free()

    def leave_room(self) -> None:
        """Let the pool of the graph that is being recorded hold free blocks of the sizes of the storages."""
        self.leave()
        if not self._in_use:
            self._allocate()
            self._free()

    def settle(self) -> None:
        """Stay in the pool of the graph that is being recorded."""
        if not self._in_use:
            self._free()
            self._allocate()
            self._settled = True

    def leave(self) -> None:
        """Be no longer a part of the pool in which the storages have settled."""
        self._settled = False
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
    """Move the local tensors of ``grads``, of one dtype, to one storage; return it and its size in bytes."""
    first = grads[0]._local_tensor
    sizes = [-(-grad._local_tensor.numel() // _ALIGNMENT) * _ALIGNMENT for grad in grads]
    flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    for grad, part in zip(grads, flat.split(sizes), strict=True):
        old = grad._local_tensor
        grad._local_tensor = part[: old.numel()].view(old.shape).copy_(old)
    storage = flat.untyped_storage()
    return storage, storage.nbytes()
