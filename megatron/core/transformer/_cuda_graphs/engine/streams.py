"""Streams of captures, and the legacy default stream, on which nothing can be captured."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from ..replacements import between

_away_from_default: dict[int, torch.cuda.Stream] = {}  # by device


def leave_default_stream() -> None:
    """Switch to another stream if the legacy default stream is current, on which autograd cannot be captured."""
    device, default = torch.cuda.current_device(), torch.cuda.default_stream()
    if torch.cuda.current_stream() == default:
        if device not in _away_from_default:
            _away_from_default[device] = torch.cuda.Stream()
        stream = _away_from_default[device]
        stream.wait_stream(default)
        torch.cuda.set_stream(stream)


def return_to_default_stream() -> None:
    """Undo ``leave_default_stream``, if its stream is still the current one."""
    stream = _away_from_default.get(torch.cuda.current_device())
    if stream is not None and torch.cuda.current_stream() == stream:
        default = torch.cuda.default_stream()
        default.wait_stream(stream)
        torch.cuda.set_stream(default)


_streams: dict[int, torch.cuda.Stream] = {}


@contextmanager
def capture_stream() -> Iterator[torch.cuda.Stream]:
    """Run on the device's capture stream, ordered after earlier and before later work of the current stream.

    All captures of the process use the same one: cuBLAS keeps a workspace for every stream that it was used on.
    """
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    outer, stream = torch.cuda.current_stream(), _streams[device]
    with between(partial(stream.wait_stream, outer), partial(outer.wait_stream, stream)), torch.cuda.stream(stream):
        yield stream


def make_workspaces() -> None:
    """Let cuBLAS allocate its workspaces for the current stream, of this thread and of autograd's.

    Allocated in a capture, as they stay, they would divide the largest blocks of the graph's pool. torch allocates one
    where it is asked for the handle, without a product, whose kernels might have to be loaded.
    """
    with torch.enable_grad():
        _AsksForHandle.apply(torch.ones((), device="cuda", requires_grad=True)).backward()


class _AsksForHandle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_blas_handle()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_blas_handle()
        return grad


LEGACY_STREAM_ADVICE = (
    "A gradient of the captured layer is accumulated on the legacy default stream: its AccumulateGrad node was made "
    "there. Build and wrap the model, and run the steps before capture, under torch.cuda.stream(...) with a stream of "
    "your own, as megatron.training does."
)


@contextmanager
def refuse_legacy_stream(name: str, leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Refuse a backward pass that accumulates gradients of ``leaves`` on the legacy default stream.

    Such a pass cannot be captured. This error comes in warm-up, before a capture would fail half-way.

    Args:
        leaves: Parameters and inputs; a hook on each notes the stream on which autograd runs its AccumulateGrad node.

    Raises:
        RuntimeError: a gradient was accumulated there; raised when the context ends.
    """
    legacy = torch.cuda.default_stream()
    streams: set[torch.cuda.Stream] = set()
    with ExitStack() as stack:
        for leaf in leaves:
            stack.callback(leaf.register_hook(lambda grad: streams.add(torch.cuda.current_stream())).remove)
        yield
    if legacy in streams:
        raise RuntimeError(f"{name} cannot be captured. {LEGACY_STREAM_ADVICE}")
