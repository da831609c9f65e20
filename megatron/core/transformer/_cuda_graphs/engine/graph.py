"""Capture single CUDA graphs: streams, memory pools, RNG states, state to restore, and the order of replays."""

import ctypes
import gc
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from ..replacements import Replacements, between, replaced_attribute
from .rng import current_rng_state, generator_states, refuse_host_draws


def _begin(graph: torch.cuda.CUDAGraph, pool: tuple | None) -> None:
    # "thread_local" lets other threads pin memory and query NCCL events during the capture.
    with _never_freed_after_an_error(graph):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")


@contextmanager
def _never_freed_after_an_error(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Context manager for registering generators with ``graph``: leaks the graph after an exception.

    Registration allocates memory. If that fails, the graph refers to the generator but not vice versa, and
    freeing the graph would abort the process.
    """
    try:
        yield
    except BaseException:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
        raise


def reclaim_memory_of_other_streams() -> None:
    """Let the next capture reuse memory of earlier captures once other streams have finished using it.

    Autograd records gradients as used on the stream of their AccumulateGrad node. If that is not the capture stream,
    torch reuses their memory only after an event on that stream has completed, and it polls events only at allocations
    outside captures. Here the first allocation records the event, and the second, after the synchronization, finds it
    complete. ``torch.cuda.empty_cache`` has the same effect but takes longer.
    """
    torch.empty(1, device="cuda")
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")


class ReplayOrder:
    """Rejects backward replays whose activations a later replay has overwritten.

    Graphs of one pool share memory: a graph may reuse memory that earlier graphs freed. Replays therefore preserve each
    other's activations only in capture order; skipping graphs is allowed. A forward replay out of this order begins a
    new *round*, and the activations of earlier rounds are lost.

    Attributes:
        last: Number of the last replay.
        round: Number of the current round.
    """

    __slots__ = ("__weakref__", "_passes", "last", "round")

    def __init__(self) -> None:
        self.last = -1
        self.round = self._passes = 0

    def number(self) -> int:
        """Return a number for the next captured pass."""
        self._passes += 1
        return self._passes - 1

    def forward(self, number: int) -> int:
        """Record a replay of the forward pass ``number``. Return its round, an argument of ``backward``."""
        if number <= self.last:
            self.round += 1
        self.last = number
        return self.round

    def backward(self, name: str, number: int | None, round_of_forward: int) -> None:
        """Record a replay of the backward pass ``number``; None for a pass that may replay repeatedly.

        Raises:
            RuntimeError: A later replay has overwritten the activations of ``round_of_forward``.
        """
        if round_of_forward != self.round or (number is not None and number <= self.last):
            raise RuntimeError(
                f"{name}: a later replay has overwritten the activations of this backward pass. Graphs that were "
                "captured together or into one pool share memory: replay them in capture order (skipping some is "
                "allowed), and run one backward pass before the next forward pass. For several backward passes, "
                "capture with retain_graph_in_backward=True; for several forward passes in flight, capture the "
                "callable once for each, with _order and one entry of sample_args per pass; for activation "
                "checkpointing around it, use use_reentrant=True."
            )
        if number is not None:
            self.last = number


_orders: weakref.WeakValueDictionary[tuple, ReplayOrder] = weakref.WeakValueDictionary()  # by pool


class WarmUp:
    """Stand-in for ``Capture`` that records nothing, for warm-up passes."""

    phase = "warm-up"

    def new_graph(self) -> None:
        """Return None, because warm-up captures no graph."""

    def recording(self, graph: None) -> AbstractContextManager[None]:
        """Return a null context."""
        return nullcontext()


class Capture:
    """Records graphs sequentially on the current stream, into one memory pool.

    Args:
        pool: A handle from ``torch.cuda.graph_pool_handle``; None for a new pool.
        draws: Whether the recorded work may draw random numbers.

    Attributes:
        order: Replay order of all graphs of the pool.
    """

    phase = "capture"

    def __init__(self, pool: tuple | None, draws: bool = True):
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.order = _orders.setdefault(self.pool, ReplayOrder())
        self._generators = [current_rng_state(), *generator_states()] if draws else []

    def new_graph(self) -> torch.cuda.CUDAGraph:
        """Return an empty graph with every generator registered."""
        graph = torch.cuda.CUDAGraph()
        # Registration allocates tensors that outlive this graph and may later be written outside inference mode.
        with torch.inference_mode(False), _never_freed_after_an_error(graph):
            for generator in self._generators:
                graph.register_generator_state(generator)
        return graph

    @contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Context manager that records into ``graph`` the work enqueued on the current stream.

        Raises:
            RuntimeError: An operation in the context cannot be captured.
            UnsupportedError: The context draws random numbers on the host.
        """
        reclaim_memory_of_other_streams()
        try:
            _begin(graph, self.pool)
            with refuse_host_draws():
                yield
            graph.capture_end()
        except BaseException as error:
            text = str(error)
            if "StreamCaptureImplicit" in text or "legacy stream" in text or "previous error during capture" in text:
                error.add_note(LEGACY_STREAM_ADVICE)
            try:
                self._abandon(graph)
            except Exception as another:
                error.add_note(f"Cleanup after the failed capture also failed: {another}")
            raise

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture, so that eager code can use the allocator and the generators again."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns if nothing was recorded yet
                graph.capture_end()
        except RuntimeError:  # raised by CUDA before torch took the allocator and generators out of capture mode
            with suppress(RuntimeError):  # the capture had not begun, or has ended
                device = torch.cuda.current_device()
                torch._C._cuda_endAllocateToPool(device, self.pool)
                torch._C._cuda_releasePool(device, self.pool)
            # Only the end of a successful capture takes generators out of capture mode; an empty one suffices.
            with torch.cuda.stream(torch.cuda.Stream()), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that the graph is empty
                empty = self.new_graph()
                _begin(empty, None)
                empty.capture_end()


_streams: dict[int, torch.cuda.Stream] = {}


@contextmanager
def capture_stream() -> Iterator[torch.cuda.Stream]:
    """Context manager that runs work on the device's capture stream, in order with work of the current stream.

    All captures share this stream, because cuBLAS keeps a workspace for every stream it has run on.
    """
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    outer, stream = torch.cuda.current_stream(), _streams[device]
    with between(partial(stream.wait_stream, outer), partial(outer.wait_stream, stream)), torch.cuda.stream(stream):
        yield stream


def make_workspaces() -> None:
    """Allocate cuBLAS workspaces for the current stream, in this thread and in autograd's.

    Allocated later, a workspace could permanently occupy part of a cached block. The block could then not be returned
    to the device for use by graphs. Requesting a handle allocates a workspace without running a matrix product.
    """
    with torch.enable_grad():
        _GetHandles.apply(torch.ones((), device="cuda", requires_grad=True)).backward()


class _GetHandles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_blas_handle()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_blas_handle()
        return grad


LEGACY_STREAM_ADVICE = (
    "A gradient of the captured layer is accumulated on the legacy default stream, where its AccumulateGrad node "
    "was created. Build and wrap the model, and run the steps before capture, under "
    "torch.cuda.stream(torch.cuda.Stream()), as megatron.training does."
)


@contextmanager
def refuse_legacy_stream(name: str, leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Context manager that rejects accumulating gradients of ``leaves`` on the legacy default stream.

    Such a backward pass cannot be captured, so the first backward pass in warm-up is checked: a hook on each leaf
    records the stream of its AccumulateGrad node, and the context raises RuntimeError on exit.
    """
    legacy = torch.cuda.default_stream()
    streams: set[torch.cuda.Stream] = set()
    with ExitStack() as stack:
        for leaf in leaves:
            stack.callback(leaf.register_hook(lambda grad: streams.add(torch.cuda.current_stream())).remove)
        yield
    if legacy in streams:
        raise RuntimeError(f"{name} cannot be captured. {LEGACY_STREAM_ADVICE}")


@contextmanager
def preserve_buffers(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Context manager that restores the buffers of ``modules`` and the buffers' values, such as router token counts."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    with rebind_buffers(modules), preserve_tensors(buffers):
        yield


@contextmanager
def rebind_buffers(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Context manager that rebinds buffers of ``modules`` to their original tensors on exit.

    After an exception, it also removes new buffers.
    """
    owners = dict.fromkeys(child for module in modules for child in module.modules())
    bound = [(owner._buffers, dict(owner._buffers)) for owner in owners]
    try:
        yield
    except BaseException:
        for current, buffers in bound:
            for name in current.keys() - buffers.keys():
                del current[name]
        raise
    finally:
        for current, buffers in bound:
            current.update(buffers)


@contextmanager
def preserve_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Context manager that restores the values of ``tensors`` on exit."""
    saved = {tensor: tensor.clone() for tensor in tensors}
    try:
        yield
    finally:
        with torch.inference_mode():  # also permits writes to inference tensors
            for tensor, value in saved.items():
                # Unchanged tensors may be read-only (expanded) or saved for a backward pass, which checks versions.
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def hide_grads_and_hooks(params: Iterable[torch.Tensor]) -> Replacements:
    """Return a context that hides ``grad`` and the hooks of ``params``.

    This separates new gradients from earlier ones. Hooks run at replay on the returned gradients; recorded in the
    graph, they would run twice.
    """
    hidden = Replacements()
    for param in params:
        hidden.add(param, "grad", None)
        hidden.add(param, "_backward_hooks", None)
        if param._post_accumulate_grad_hooks:  # they run if activation checkpointing accumulates gradients
            hidden.add(param, "_post_accumulate_grad_hooks", {})  # torch would keep calling them after None
    return hidden


def pause_gc() -> AbstractContextManager[None]:
    """Return a context without garbage collection: freeing a graph would invalidate the capture of another graph."""
    return between(gc.disable, gc.enable) if gc.isenabled() else nullcontext()


def allow_nested_backward() -> AbstractContextManager[None]:
    """Return a context that lets activation checkpointing run its backward pass inside ``torch.autograd.grad``.

    torch forbids this because ``grad`` does not return the nested pass's gradients; the caller must collect them.
    """
    return replaced_attribute([torch.autograd], "_is_checkpoint_valid", lambda is_valid: lambda: True)


def connected_leaves(outputs: Iterable[torch.Tensor], stops: Iterable[torch.Tensor] = ()) -> list[torch.Tensor]:
    """Return the distinct leaves that require grad in the graph of ``outputs`` up to ``stops``, in arbitrary order."""
    outputs = list(outputs)
    leaves = {id(tensor): tensor for tensor in outputs if tensor.is_leaf and tensor.requires_grad}
    seen = {tensor.grad_fn for tensor in stops if tensor.grad_fn is not None}
    nodes = list({tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None} - seen)
    seen.update(nodes)
    while nodes:
        node = nodes.pop()
        if isinstance(node, torch._C._functions.AccumulateGrad):
            leaves[id(node.variable)] = node.variable
        following = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= following
        nodes += following
    return list(leaves.values())
