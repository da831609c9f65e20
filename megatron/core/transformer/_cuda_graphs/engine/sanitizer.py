"""For developers: with ``MEGATRON_CUDA_GRAPH_SANITIZER=1`` each replay first looks at the memory that its graph uses.

The guards of a usual replay compare where tensors are with where they were. This asks of the memory at capture whether
it is still allocated. It costs a walk through the allocator's memory before every replay. It looks at no graphs of
TransformerEngine's engine.
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .addresses import MovedBufferError, address_of

VARIABLE = "MEGATRON_CUDA_GRAPH_SANITIZER"


def requested() -> bool:
    """Whether the environment variable asks for it."""
    return os.environ.get(VARIABLE) == "1"


class CapturedTensor:
    """A tensor that a graph uses, as it was at capture; it is not kept alive.

    Attributes:
        is_on_device: Whether its memory is a GPU's.
    """

    def __init__(self, name: str, tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        self.is_on_device = storage.device.type == "cuda"
        self.name, self.address = name, tensor.data_ptr()
        self._storage, self._start, self._bytes = StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()

    def problem(self) -> str | None:
        """What has happened to its memory; None if nothing."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return "was freed"
        if storage.nbytes() < self._bytes:
            return f"was resized from {self._bytes} to {storage.nbytes()} bytes"
        return "was moved" if storage.data_ptr() != self._start else None


def captured(named: Iterable[tuple[str, torch.Tensor | None]]) -> list[CapturedTensor]:
    """Return what the graphs use of the tensors in ``named``: those with memory."""
    return [CapturedTensor(name, tensor) for name, tensor in named if address_of(tensor)]


def captured_of(module: torch.nn.Module | None) -> list[CapturedTensor]:
    """Return what graphs use of ``module``: parameters, their main gradients, buffers."""
    named = [] if module is None else [*module.named_parameters(), *module.named_buffers()]
    gradients = [(f"the main gradient of {name}", getattr(tensor, "main_grad", None)) for name, tensor in named]
    return captured(named) + captured(gradients)


class Sanitizer:
    """Checks the memory that the graphs of one callable use.

    Args:
        pool: The pool of the graphs, whose memory is theirs though nothing else holds it.
    """

    def __init__(self, name: str, tensors: Sequence[CapturedTensor], pool: tuple[int, int]):
        self._name, self._tensors, self._pool = name, tensors, tuple(pool)

    def check(self, phase: str) -> None:
        """Look whether all memory is there, before this phase is replayed.

        Raises:
            MovedBufferError: names the tensor whose memory is not there.
        """
        for tensor in self._tensors:
            problem = tensor.problem()
            if problem is not None:
                self._refuse(tensor, problem, phase)
        # Without a GPU there is no allocator to ask.
        on_device = [tensor for tensor in self._tensors if tensor.is_on_device]
        if not on_device:
            return
        for tensor, there in zip(on_device, self._allocated([tensor.address for tensor in on_device]), strict=True):
            if not there:
                self._refuse(tensor, "is not allocated any more", phase)

    def _refuse(self, tensor: CapturedTensor, problem: str, phase: str) -> None:
        raise MovedBufferError(
            f"{VARIABLE}: before the {phase} replay of {self._name}, the memory of {tensor.name} at "
            f"{tensor.address:#x}, which the graphs use, {problem}"
        )

    def _allocated(self, addresses: Sequence[int]) -> list[bool]:
        """For each address whether torch's allocator has it in use, or the graphs' pool owns it."""
        used = sorted(self._used(torch.cuda.memory_snapshot()))
        starts = [start for start, _ in used]
        places = [bisect_right(starts, address) - 1 for address in addresses]
        return [place >= 0 and address < used[place][1] for address, place in zip(addresses, places, strict=True)]

    def _used(self, segments: Iterable[dict]) -> Iterable[tuple[int, int]]:
        """The memory in use, each stretch from its first address to the one after its last."""
        for segment in segments:
            if tuple(segment["segment_pool_id"]) == self._pool:
                yield segment["address"], segment["address"] + segment["total_size"]
                continue
            for block in segment["blocks"]:
                if block["state"].startswith("active"):
                    yield block["address"], block["address"] + block["size"]
