"""Runs code written for ``torch.cuda`` and CUDA graphs on CPU tensors, for tests and demonstrations without a GPU.

``install()`` in a process before megatron is imported, or ``python -m megatron_fsdp_cuda_graphs.cpu_backend SCRIPT``.
A captured graph is a tape: the aten operators and collectives of the capture with the addresses they used. ``python -m
megatron_fsdp_cuda_graphs.cpu_backend --list`` names everything of torch that is replaced, with the reason.

Device tensors are CPU tensors: ``is_cuda`` is true for them, ``device.type`` is "cpu". A tensor made without a device
is a host tensor, as on a GPU: a capture does not record what is done with it.

Collectives finish where they are launched, and their results appear at ``wait``: before it, outputs hold NaN. A script
that calls ``install()`` itself and uses process groups ends with ``leave()``.

It shows whether a program is right for CUDA graphs, not how fast: what a capture forbids is refused, what it would not
have computed is not there after it, memory that moved is an error. It does not show races between streams, the stream
that an autograd node remembers, memory that one graph of a pool reuses from another, NCCL, TransformerEngine or FP8.
"""

from .installation import install, installed, leave, uninstall
from .memory import StaleAddress
from .streams import CaptureError

__all__ = ["CaptureError", "StaleAddress", "install", "installed", "leave", "uninstall"]
