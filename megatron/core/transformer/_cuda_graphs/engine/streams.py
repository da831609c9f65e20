"""Streams of captures, and the legacy default stream, on which nothing can be captured."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

_away_from_default: dict[int, torch.cuda.Stream] = {}  # by device


def leave_default_stream() -> None:
    """Go on on another stream if the legacy default stream is current: what autograd meets there cannot be captured."""
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
    """Run on the device's stream for captures, after all that the current stream was given, and before all it will be.

    It is one stream for all captures of the process: cuBLAS keeps a workspace for every stream that it has met.
    """
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    outer, stream = torch.cuda.current_stream(), _streams[device]
    stream.wait_stream(outer)
    try:
        with torch.cuda.stream(stream):
            yield stream
    finally:
        outer.wait_stream(stream)


LEGACY_STREAM_ADVICE = (
    "A gradient of the captured layer is accumulated on the legacy default stream: its AccumulateGrad node was made "
    "there. Build and wrap the model, and run the steps before capture, under torch.cuda.stream(...) with a stream of "
    "your own, as megatron.training does."
)


@contextmanager
def refuse_legacy_stream(name: str, leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Refuse a backward pass that hands over gradients of ``leaves`` on the legacy default stream.

    No capture can hold such a pass. Here it fails before capture has begun, and leaves nothing behind.

    Args:
        name: What the error calls the callable.
        leaves: Parameters and inputs; a hook of each notes the stream on which autograd runs its AccumulateGrad node.

    Raises:
        RuntimeError: when the context ends.
    """
    legacy = torch.cuda.default_stream()
    streams: set[torch.cuda.Stream] = set()
    handles = [leaf.register_hook(lambda grad: streams.add(torch.cuda.current_stream())) for leaf in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if legacy in streams:
        raise RuntimeError(f"{name} cannot be captured. {LEGACY_STREAM_ADVICE}")
