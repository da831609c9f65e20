"""For developers: with ``MEGATRON_CUDA_GRAPH_SANITIZER=1`` each replay first looks at the memory that its graph uses.

The guards of a usual replay compare where tensors are with where they were. This asks of the memory at capture whether
it is still allocated. It costs a walk through the allocator's memory before every replay. It looks at no graphs of
TransformerEngine's engine.
"""

import os
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .addresses import MovedBufferError, address_of
from .memory import lies_in

VARIABLE = "MEGATRON_CUDA_GRAPH_SANITIZER"


def requested() -> bool:
    """Whether the environment variable asks for it."""
    return os.environ.get(VARIABLE) == "1"


def problem_of(storage: StorageWeakRef, address: int, nbytes: int) -> str | None:
    """Say what has happened to the memory of a storage since it was ``nbytes`` at ``address``; None if nothing."""
    now = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    if now is None:
        return "was freed"
    if now.nbytes() < nbytes:
        return f"was resized from {nbytes} to {now.nbytes()} bytes"
    return "was moved" if now.data_ptr() != address else None


class CapturedTensor:
    """A tensor that a graph uses, as it was at capture; it is not kept alive.

    Attributes:
        is_on_device: Whether its memory is a GPU's.
    """

    def __init__(self, name: str, tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        self.is_on_device = storage.device.type == "cuda"
        self.name, self.address = name, tensor.data_ptr()
        self._memory = StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()

    def problem(self) -> str | None:
        """What has happened to its memory; None if nothing."""
        return problem_of(*self._memory)


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
        # Without a GPU there is no allocator to ask.
        asks = any(tensor.is_on_device for tensor in self._tensors)
        used = sorted(self._used(torch.cuda.memory_snapshot())) if asks else []
        for tensor in self._tensors:
            problem = tensor.problem()
            if problem is None and tensor.is_on_device and not lies_in(used, tensor.address):
                problem = "is not allocated any more"
            if problem is not None:
                raise MovedBufferError(
                    f"{VARIABLE}: before the {phase} replay of {self._name}, the memory of {tensor.name} at "
                    f"{tensor.address:#x}, which the graphs use, {problem}"
                )

    def _used(self, segments: Iterable[dict]) -> Iterator[tuple[int, int]]:
        """The memory that torch's allocator has in use or the graphs' pool owns, as ``lies_in`` takes it."""
        for segment in segments:
            if tuple(segment["segment_pool_id"]) == self._pool:
                yield segment["address"], segment["address"] + segment["total_size"]
                continue
            for block in segment["blocks"]:
                if block["state"].startswith("active"):
                    yield block["address"], block["address"] + block["size"]
