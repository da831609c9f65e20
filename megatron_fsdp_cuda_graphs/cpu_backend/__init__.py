"""Emulate ``torch.cuda`` and CUDA graphs on CPU tensors, for tests and demonstrations without a GPU.

Call ``install()`` before importing megatron, or run ``python -m megatron_fsdp_cuda_graphs.cpu_backend SCRIPT``. A
captured graph is a tape: the ATen operators and collectives of the capture, with their addresses.

Device tensors are CPU tensors: ``is_cuda`` is true, ``device.type`` is "cpu". A tensor created without a device is a
host tensor, as on a GPU: a capture does not record operations on it.

Collectives complete at launch, but results become visible at ``wait``: until then outputs hold NaN. A script that calls
``install()`` and uses process groups must end with ``leave()``.

The backend tests the correctness of a program under CUDA graphs, not its speed. It rejects operations that a real
capture forbids, discards results of a capture, and raises if memory of a graph moves. Memory that a graph frees is
reused: later graphs of its pool fill it with NaN. Races between streams, streams of autograd nodes, NCCL,
TransformerEngine and FP8 are not emulated.
"""

from .installation import install, installed, leave
from .memory import StaleAddress
from .streams import CaptureError

__all__ = ["CaptureError", "StaleAddress", "install", "installed", "leave"]
