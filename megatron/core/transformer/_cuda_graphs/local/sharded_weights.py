"""Weights sharded across ranks (``--tensor-parallel-num-weight-shards``) in local graphs.

megatron-core links these weights in a chain, in order of use. Each use starts the gather of the next weight on a side
stream, and each backward pass reduces a weight's gradient while it computes the gradient of the previous weight. A
graph must complete the communication that it starts: at the end of a pass it waits for gathers and reductions and joins
the side streams. The first weight of the next graph is then gathered, and no stream uses the memory of this graph after
its replay.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

# megatron-core's name for the chain of weights used in graphs.
_CHAIN = "GTP_graphed"
# Flags of a weight: the graph that started its gather (or the reduction of its gradient) has waited for it.
_MARKS = ("_already_ag_drained", "_recompute_already_drained", "_already_finalized")
# Attributes of a weight for an in-flight gather or reduction.
_UNDER_WAY = ("_prefetch_handle", "_recompute_prefetch_handle", "_wgrad_rs_handle", "_wgrad_input_bufs")

_GTP_RUNNER_STREAMS: list[torch.cuda.Stream] = []


def get_gtp_runner_streams() -> list[torch.cuda.Stream]:
    """Return the streams on which backward graphs with sharded weights have replayed since ``forget_replay_streams``.

    megatron-core waits for these streams before it reads main gradients.
    """
    return _GTP_RUNNER_STREAMS


def forget_replay_streams() -> None:
    """Clear the list returned by ``get_gtp_runner_streams``."""
    _GTP_RUNNER_STREAMS.clear()


def gather_into_pool(device: int, pool: tuple) -> None:
    """Make megatron-core allocate gathered weights for graphs from ``pool``, the graphs' memory pool."""
    with suppress(ImportError):
        _implementation().set_cuda_graph_mempool(device, pool)


class ShardedWeights:
    """The sharded weights used by a runner's graphs. Methods have no effect without such weights."""

    def __init__(self, module: torch.nn.Module):
        self._params = [param for param in module.parameters() if getattr(param, "is_gtp_weight_remat", False)]
        self._completed: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._params)

    @contextmanager
    def completing(self, *, reductions: bool, finalizes: bool) -> Iterator[None]:
        """Context manager for a pass: on exit, complete the communication that it started.

        Args:
            reductions: Whether the pass reduces gradients in addition to gathering weights, as a backward pass does.
            finalizes: Whether to add the last reduced gradients to main gradients.
        """
        if not self:
            yield
            return
        current, side_streams = torch.cuda.current_stream(), self._side_streams()
        for stream in side_streams:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1)  # CUDA does not join a stream that captured nothing
        yield
        # Gathers first: the second call would add stale gradients for weights that were only gathered.
        _implementation().wait_async_comms(_CHAIN, skip_rs=True)
        if reductions:
            _implementation().wait_async_comms(_CHAIN, finalize_after_drain=finalizes)
        for stream in side_streams:
            current.wait_stream(stream)

    def _side_streams(self) -> list[torch.cuda.Stream]:
        """Return the streams that gather these weights and reduce their gradients."""
        groups = {id(weight.group): weight.group for weight in self.with_neighbors()}.values()
        streams = (_implementation().get_ag_stream, _implementation().get_rs_stream)
        return list(dict.fromkeys(stream(_CHAIN, group) for group in groups for stream in streams))

    def with_neighbors(self) -> list[Any]:
        """Return the weights and their neighbors in the prefetch chain, whose state a pass may also change."""
        leaders = [
            weight
            for param in self._params
            for weight in (param, getattr(param, "next_w", None), getattr(param, "prev_w", None))
            if weight is not None
        ]
        return _unique(weight for leader in leaders for weight in _group_of(leader))

    def settle(self) -> None:
        """Wait for warm-up communication and clear the weights' flags, so that capture starts as a new step does."""
        if self:
            _implementation().wait_async_comms(_CHAIN)
            for stream in self._side_streams():
                torch.cuda.current_stream().wait_stream(stream)
            self._clear(_MARKS, False)

    def forget(self) -> None:
        """Discard the gathers and reductions of a failed pass, so that eager steps do not wait for them."""
        self._completed = []
        if self:
            self._clear(_MARKS, False)
            self._clear(_UNDER_WAY, None)
            for weight in self.with_neighbors():
                _implementation()._inflight_comm_params.discard(weight)

    def _clear(self, names: Sequence[str], value: Any) -> None:
        # megatron-core only clears these flags when it uses a weight.
        for weight in self.with_neighbors():
            for name in names:
                if getattr(weight, name, value) is not value:
                    setattr(weight, name, value)

    def note_backward(self, params: Iterable[Any]) -> None:
        """Store which main gradients are complete after the captured backward pass of ``params``."""
        self._completed = completed_in_backward(params)

    def end_backward_replay(self) -> None:
        """Notify ``DistributedDataParallel`` of completed main gradients, as the eager backward pass does."""
        if self._params and (stream := torch.cuda.current_stream()) not in _GTP_RUNNER_STREAMS:
            _GTP_RUNNER_STREAMS.append(stream)
        for weight in self._completed:
            weight.grad = None
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = True
            hook: Callable[[], None] | None = getattr(weight, "_grad_accum_hook", None)
            if hook is not None:
                hook()


def completed_in_backward(params: Iterable[Any]) -> list[Any]:
    """Return the sharded weights whose main gradients are complete after a backward pass of ``params``.

    The gradient of the first weight of a chain is complete in its own backward pass. Any other gradient is complete in
    the backward pass of the previous weight.
    """
    leaders = []
    for param in params:
        follows_another = getattr(param, "is_routed_expert", False) and getattr(param, "weight_list", None) is None
        if getattr(param, "is_gtp_weight_remat", False) and not follows_another:
            next_weight = getattr(param, "next_w", None)
            leaders += [param] if getattr(param, "prev_w", None) is None else []
            leaders += [] if next_weight is None else [next_weight]
    return _unique(weight for leader in leaders for weight in _group_of(leader))


def _group_of(leader: Any) -> list[Any]:
    """Return the weights gathered together with ``leader``: all experts of a grouped layer, or only ``leader``."""
    return list(getattr(leader, "weight_list", None) or [leader])


def _unique(weights: Iterable[Any]) -> list[Any]:
    return list({id(weight): weight for weight in weights}.values())


def _implementation() -> Any:
    from megatron.core.tensor_parallel import generalized_tensor_parallelism  # not in megatron-core before 0.19

    return generalized_tensor_parallelism
