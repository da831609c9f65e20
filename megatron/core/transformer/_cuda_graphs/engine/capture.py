"""The state of the process around a capture: RNG, garbage collection, TransformerEngine's flag, the stream."""

import gc
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from .rng import current_rng_state, generator_states


def recover_from_failed_capture(pool: tuple, capture: "Capture | None" = None) -> None:
    """Take the allocator and the generators out of capture mode, in which torch leaves both.

    Args:
        pool: The memory pool of the failed capture.
        capture: What recorded, if it was ours: its graphs know generators that are not in use where it failed.
    """
    with suppress(RuntimeError):  # where the capture had not begun, or could be ended
        device = torch.cuda.current_device()
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    # What takes generators out of capture mode is the end of a capture that succeeds: an empty one.
    with torch.cuda.stream(torch.cuda.Stream()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the graph is empty
        graph = (capture or Capture(None)).new_graph()
        graph.capture_begin(capture_error_mode="thread_local")
        graph.capture_end()


@contextmanager
def recover_te_engine(pool: tuple, modules: Sequence[torch.nn.Module], recipe: Any = None) -> Iterator[None]:
    """Clean up after TransformerEngine's engine, which leaves a failed capture as it is.

    Its stream is then current, garbage collection off, torch capturing, its own capture flag set, the classes of the
    modules have another ``__call__``, and FP8 statistics are those of warm-up.

    Args:
        pool: The memory pool that the engine captures into.
        modules: What it captures.
        recipe: The quantization recipe; None without quantization.
    """
    stream, gc_enabled = torch.cuda.current_stream(), gc.isenabled()
    calls = {kind: vars(kind).get("__call__") for kind in map(type, modules)}
    graph = sys.modules.get("transformer_engine.pytorch.graph")
    statistics = graph.save_fp8_tensors(modules, recipe) if graph is not None and recipe is not None else None
    try:
        yield
    except BaseException:
        for kind, call in calls.items():
            if call is not None:
                setattr(kind, "__call__", call)  # noqa: B010
            elif "__call__" in vars(kind):
                del kind.__call__
        if graph is not None:
            graph.set_capture_end()
            graph.restore_fp8_tensors(modules, statistics)
        torch.cuda.set_stream(stream)
        if gc_enabled:
            gc.enable()
        recover_from_failed_capture(pool)
        raise


@contextmanager
def transformer_engine_flag() -> Iterator[None]:
    """Tell TransformerEngine's modules, where there are any, that graphs are being captured."""
    graph = sys.modules.get("transformer_engine.pytorch.graph")
    if graph is None or graph.is_graph_capturing():
        yield
        return
    graph.set_capture_start()
    try:
        yield
    finally:
        graph.set_capture_end()


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


def release_cached_memory(thorough: bool = True) -> None:
    """Give the device what is free in the allocator's cache: graphs, which have a pool of their own, cannot use it.

    Args:
        thorough: Whether all garbage is collected before. A walk through all objects of a program takes longer than the
            capture of many graphs; if not, garbage of the last moments is collected.
    """
    gc.collect(2 if thorough else 1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


class Capture:
    """Records one graph after another on the current stream, over one memory pool.

    Args:
        pool: A handle of ``torch.cuda.graph_pool_handle``; None for a new pool.
    """

    def __init__(self, pool: tuple | None):
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._generators = [current_rng_state(), *generator_states()]

    def new_graph(self) -> torch.cuda.CUDAGraph:
        """Return an empty graph that knows every generator."""
        graph = torch.cuda.CUDAGraph()
        # Registration makes tensors, which outlive this graph and may be written outside inference mode later.
        with torch.inference_mode(False):
            for generator in self._generators:
                graph.register_generator_state(generator)
        return graph

    @contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record what the current stream is given into ``graph``.

        Raises:
            RuntimeError: something in the context cannot be captured.
        """
        # Autograd marks gradients as used on the stream of their AccumulateGrad node. If that is not this stream, torch
        # does not use their memory again until it sees that the other is done with it, for which it looks here only.
        torch.cuda.empty_cache()
        # "thread_local": threads that pin memory or watch NCCL may go on meanwhile.
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            yield
            graph.capture_end()
        except BaseException as error:
            _explain(error)
            try:
                self._abandon(graph)
            except Exception as another:
                error.add_note(f"What the failed capture left could not be cleaned up: {another}")
            raise

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture so that the allocator and the generators serve eager work again."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns where nothing had been recorded yet
                graph.capture_end()
        except RuntimeError:  # CUDA refused, before torch had told allocator and generators that capture is over
            recover_from_failed_capture(self.pool, self)


# What warm-up runs in place of Capture.recording.
not_recording = nullcontext

_LEGACY_STREAM = (
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
        raise RuntimeError(f"{name} cannot be captured. {_LEGACY_STREAM}")


@contextmanager
def allow_nested_backward() -> Iterator[None]:
    """Let activation checkpointing run its backward pass inside ``torch.autograd.grad``.

    It asks torch, which says no, because what it accumulates is not among what ``grad`` returns. The caller must take
    care of that.
    """
    asked = torch.autograd._is_checkpoint_valid
    torch.autograd._is_checkpoint_valid = lambda: True
    try:
        yield
    finally:
        torch.autograd._is_checkpoint_valid = asked


def _explain(error: BaseException) -> None:
    text = str(error)
    if "StreamCaptureImplicit" in text or "legacy stream" in text or "previous error during capture" in text:
        error.add_note(_LEGACY_STREAM)
