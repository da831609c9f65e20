"""One module, or function of one, for one micro-batch as CUDA graphs that its first training step recorded."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ..engine.quantization import current_quantization
from ..engine.replay import ReplayOptions
from ..engine.slot import SlotCapture, WarmupRecord
from ..errors import ArgumentError, CallOrderError
from .arguments import (
    ArgMetadata,
    CudagraphBufferMetadata,
    _check_supported_type,
    described,
    metadata_of,
    metas_of,
    mismatches,
    tensors_of,
    with_tensors,
)
from .capture import RecordedCall, connected_params
from .guards import FunctionGuard
from .nodes import LocalReplay, _CudagraphRecordNode, _GraphStatus, replay_runner
from .record import _CudagraphGlobalRecord
from .session import CaptureSession
from .turns import Turn


def _graph_attribute(name: str, doc: str) -> Any:
    """An attribute that holds one of a runner's graphs; to delete it, or assign None, frees both."""

    def assign(runner: "_CudaGraphRunner", graph: Any) -> None:
        setattr(runner, name, graph)
        if graph is None:
            runner.free_graphs()

    return property(lambda runner: getattr(runner, name), assign, lambda runner: runner.free_graphs(), doc)


def _static_tensors(read: Callable[["_CudaGraphRunner", SlotCapture], Any], otherwise: Any = ()) -> Any:
    """An attribute that is read off the static tensors of a runner's graphs; ``otherwise`` where there are none."""
    return property(lambda runner: otherwise if runner.call.slot is None else read(runner, runner.call.slot))


class _CudaGraphRunner(torch.nn.Module):
    """Runs ``func`` of ``base_module`` eagerly while a step is recorded, and as CUDA graphs from then on.

    It serves one micro-batch at a time: from a forward pass to its backward pass it is busy. Its ``CudaGraphManager``
    makes as many as are busy at once.

    Args:
        mempool: The memory pool of the graphs, a handle of ``torch.cuda.graph_pool_handle``.
        fwd_graph_input_args, fwd_graph_input_kwargs: Arguments of the call to record; calls to replay must be like it.
        func: What to run; None for the module's own call. With a function the base may be any object: the modules
            among its attributes are those that the function uses.
        need_backward: Whether gradients may be wanted; without, graphs are captured under ``torch.no_grad``.
        cache_key: The key by which the manager finds it; None if it is found by its arguments.

    Raises:
        ArgumentTypeError: an argument is of a type that no graph takes.
    """

    # torch.nn.Module's __setattr__ looks for parameters and submodules, which takes time in every replay.
    __setattr__ = object.__setattr__

    call: RecordedCall
    fwd_graph = _graph_attribute("_fwd_graph", "The forward graph, if it was captured.")
    bwd_graph = _graph_attribute("_bwd_graph", "The backward graph, if it was captured.")
    fwd_graph_input_surface = _static_tensors(
        lambda runner, slot: (*(tensor.detach() for tensor in slot.inputs), *runner.params_to_backprop)
    )
    num_dgrads = _static_tensors(lambda runner, slot: len(slot.inputs), 0)  # how many of these are inputs
    fwd_graph_output_surface = _static_tensors(lambda runner, slot: tensors_of(slot.outputs))
    fwd_graph_outputs = _static_tensors(  # what the captured call returned, with the static outputs
        lambda runner, slot: with_tensors(runner.call.returned, iter(tensors_of(slot.outputs))), None
    )
    static_grad_outputs = _static_tensors(lambda runner, slot: tensors_of(slot.grad_outputs))
    static_grad_inputs = _static_tensors(lambda runner, slot: slot.grad_inputs)  # None for an input that gets none

    def __init__(
        self,
        base_module: Any,
        mempool: tuple,
        fwd_graph_input_args: Sequence[Any],
        fwd_graph_input_kwargs: Mapping[str, Any],
        func: Callable | None,
        need_backward: bool,
        cache_key: Hashable | None = None,
    ):
        super().__init__()
        # What it runs.
        self.base_module, self.mempool, self.cache_key = base_module, mempool, cache_key
        self.is_first_layer = getattr(base_module, "is_first_layer", True)  # annotate_first_last_layer says so
        self.is_last_layer = getattr(base_module, "is_last_layer", True)
        config = getattr(base_module, "config", None)
        self.num_warmup_steps = getattr(config, "cuda_graph_warmup_steps", 0)
        self.backward_retain_grad = getattr(config, "cuda_graph_retain_backward_graph", False)
        self.fp8_enabled = getattr(config, "fp8", None) is not None
        self.fp4_enabled = getattr(config, "fp4", None) is not None
        self.call = call = RecordedCall(
            base_module,
            func,
            fwd_graph_input_args,
            fwd_graph_input_kwargs,
            pool=mempool,
            retain_graph=self.backward_retain_grad,
        )
        self.name, self.module, self.function, self.func = call.name, call.module, call.function, call.func
        self.fwd_graph_input_arg_metas = [_as_meta(value) for value in call.args]
        self.fwd_graph_input_kwarg_metas = {name: _as_meta(value) for name, value in call.kwargs.items()}
        self.gtp_remat = bool(call.sharded)  # --tensor-parallel-num-weight-shards

        # What was recorded. `backward_pass`: the backward pass of autograd in which its own was; others share it.
        self.grad_enabled = need_backward and torch.is_grad_enabled()  # there is a backward graph, or will be
        self.is_forward_only = need_backward and not torch.is_grad_enabled()
        self.is_frozen = False  # nothing to differentiate
        self.fwd_graph_recorded = self.bwd_graph_recorded = self.cudagraph_created = False
        self.backward_pass = -1
        self._session = _CudagraphGlobalRecord.session

        # Its graphs; none before the capture, and after `free_graphs`.
        self._fwd_graph: Any = None
        self._bwd_graph: Any = None
        self._replay: LocalReplay | None = None
        self._guard: FunctionGuard | None = None  # inference has none
        self.params_to_backprop: tuple[torch.Tensor, ...] = ()  # those that get a gradient
        self._unread_outputs: set[int] = set()  # by no graph

        # Its replays.
        self.status = _GraphStatus.FWD_READY  # which pass comes next
        self.turn = Turn()  # when they are due
        self.bwd_graph_replay_complete_event = torch.cuda.Event()

    def __str__(self) -> str:
        return str(self.call)

    def expect(self, status: _GraphStatus) -> None:
        """Refuse a pass that is not due.

        Raises:
            CallOrderError: the other pass comes next.
        """
        if self.status is not status:
            due, called = ("backward", "forward") if status is _GraphStatus.FWD_READY else ("forward", "backward")
            raise CallOrderError(f"{self.name}: a {called} pass, but its {due} pass comes next")

    def reset(self) -> None:
        """Free the graphs and return to the state before recording."""
        self.free_graphs()
        self.call.sharded.forget()
        self._session = _CudagraphGlobalRecord.session
        self.turn = Turn()
        self.fwd_graph_recorded = self.bwd_graph_recorded = self.cudagraph_created = False
        self.status = _GraphStatus.FWD_READY

    def free_graphs(self) -> None:
        """Free both graphs and their static tensors."""
        for param in self.params_to_backprop:
            if getattr(param, "_cudagraph_wgrad_ready_event", None) is self.bwd_graph_replay_complete_event:
                del param._cudagraph_wgrad_ready_event
        self.call.reset()
        self._fwd_graph = self._bwd_graph = self._replay = self._guard = None
        self.params_to_backprop = ()

    # -------------------------------------------------------------------------------------------------- recording

    def record_graph_capture(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run eagerly, and record the first call and its backward pass. Returns what ``func`` returns."""
        output = self.func(*args, **kwargs)
        differentiable = [tensor for tensor in tensors_of(output) if tensor.requires_grad] if self.grad_enabled else []
        if differentiable and torch.is_grad_enabled():
            noted = iter(_CudagraphRecordNode.apply(self, *differentiable))
            output = with_tensors(
                output, iter([next(noted) if tensor.requires_grad else tensor for tensor in tensors_of(output)])
            )
            self.status = _GraphStatus.BWD_READY
        if not self.fwd_graph_recorded:
            self.is_frozen = torch.is_grad_enabled() and not differentiable
            self.apply_cudagraph_record_metadata(args, kwargs, output)
            self.call.quantization = current_quantization()
            self._session = _CudagraphGlobalRecord.session
            self.turn = self._session.turns.record_forward(self.name)
            _CudagraphGlobalRecord.record_fwd_graph(self, described(args), described(kwargs), described(output))
            self.fwd_graph_recorded = True
        return output

    def record_backward(self) -> None:
        """Note a backward pass of the recorded step; the first is recorded.

        Raises:
            RuntimeError: the runner waits for its forward pass.
        """
        self.expect(_GraphStatus.BWD_READY)
        self.status = _GraphStatus.FWD_READY
        if not self.bwd_graph_recorded:
            self.backward_pass = torch._C._current_graph_task_id()
            self._session.turns.record_backward(self.turn)
            _CudagraphGlobalRecord.record_bwd_graph(self)
            self.bwd_graph_recorded = True

    def apply_cudagraph_record_metadata(self, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        """Attach ``cg_buffer_metadata`` to all tensors that a recorded call takes or returns."""
        recording = _CudagraphGlobalRecord.recording_session().recording
        with_backward = any(tensor.requires_grad for tensor in tensors_of(outputs))
        for tensor in tensors_of(args, kwargs):
            known = getattr(tensor, "cg_buffer_metadata", None)
            if known is None or known.recording is not recording:
                known = tensor.cg_buffer_metadata = CudagraphBufferMetadata(recording=recording)
            known.is_cudagraph_input = True
            known.is_saved_for_backward |= with_backward
            known.input_use_count += 1
            known.cudagraph_reuse_ref_count += known.is_cudagraph_output
        for tensor in tensors_of(outputs):
            tensor.cg_buffer_metadata = CudagraphBufferMetadata(is_cudagraph_output=True, recording=recording)

    # ---------------------------------------------------------------------------------------------------- capture

    def begin_capture(self, session: CaptureSession, warmup: WarmupRecord) -> None:
        """Begin the capture of the recorded passes.

        Args:
            session: What is shared with the runners of the same capture.
            warmup: What passes of the same function have shown, or will show; shared with its other runners.
        """
        self._session = session
        self.grad_enabled = self.bwd_graph_recorded
        self.call.begin(session.buffers, warmup, self.grad_enabled)

    def create_fwd_graph(self, args: Any, kwargs: Any, outputs: Any = None, clone_inputs: bool = True) -> None:
        """Capture the forward graph; see ``RecordedCall.forward``."""
        if not self.call.begun:
            self.begin_capture(self._session, WarmupRecord())
        self._fwd_graph = self.call.forward(args, kwargs, outputs, clone_inputs)

    def create_bwd_graph(self) -> None:
        """Capture the backward graph, after the forward graph; see ``RecordedCall.backward``.

        Raises:
            CallOrderError: there is no forward graph, or it was captured without grad.
        """
        if self._fwd_graph is None or not self.grad_enabled:
            raise CallOrderError(f"{self.name}: no backward graph without a forward graph that was captured with grad")
        self._bwd_graph = self.call.backward()

    def finish(self) -> None:
        """Make ready to replay, once all graphs of the session are captured."""
        call, session, slot = self.call, self._session, self.call.slot
        assert slot is not None
        self._guard = session.guards.get(self.function)
        places = [
            (session.buffers.input_of(tensor, call.writes_inputs), metadata_of(meta).users)
            for meta, tensor in zip(call.inputs, slot.inputs, strict=True)
        ]
        self._replay = slot.finish(partial(LocalReplay, session.turns, places))
        if self._guard is not None:
            outputs = enumerate(map(metadata_of, call.outputs))
            self._unread_outputs = {i for i, known in outputs if not known.is_cudagraph_input}
        self.params_to_backprop = slot.params if self._bwd_graph is not None else ()
        self.fwd_graph_recorded = self.cudagraph_created = True

    def get_connected_params(self, outputs: Any) -> tuple[torch.nn.Parameter, ...]:
        """The parameters of the module from which ``outputs`` were computed, by autograd's graph, in their order."""
        return connected_params(self.module, outputs)

    def get_quantization_context(self) -> AbstractContextManager:
        """The context of FP8 or FP4 in which the recorded call ran; none without quantization."""
        return self.call.quantized_context()

    # ------------------------------------------------------------------------------------- which calls can be replayed

    def get_mismatch_errors(self, args: tuple, kwargs: dict[str, Any]) -> list[str]:
        """Return a line for each argument that is not like the captured one; none if the graphs can be replayed."""
        call = self.call
        return mismatches(args, kwargs, call.args, call.kwargs, self.grad_enabled and torch.is_grad_enabled())

    def can_differentiate(self, wants_grad: bool, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a replay on these arguments has the gradients that ``wants_grad`` asks for, or needs none."""
        if self.grad_enabled or not wants_grad:
            return True
        trained = (*tensors_of(args, kwargs), *self.module.parameters())
        return self.is_frozen and not any(tensor.requires_grad for tensor in trained)

    def must_run_eagerly_without_grad(self) -> bool:
        """Whether a pass without grad may not be replayed, since only one with grad changes buffers or metrics.

        Raises:
            RuntimeError: it must not run eagerly either, as its weights are sharded.
        """
        if torch.is_grad_enabled() or not (self.grad_enabled and self.call.changes_state):
            return False
        if self.gtp_remat:
            raise RuntimeError(
                f"{self.name} changes buffers in training, so a pass without grad cannot replay its CUDA graph "
                "(--cuda-graph-impl local), and weights that are sharded (--tensor-parallel-num-weight-shards) let no "
                "single layer run eagerly. Call eval() on the model before passes without grad."
            )
        return True

    # ----------------------------------------------------------------------------------------------------- replay

    def replay_graph_capture(self, is_first_microbatch: bool, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """Replay the forward graph on arguments like those at capture, with autograd.

        Returns:
            What ``func`` returned at capture, in a tuple if it was none.

        Raises:
            ArgumentError: arguments do not match; says which, and how.
            RuntimeError: a replay is not possible now; see ``_CudagraphReplayNode``.
        """
        problems = self.get_mismatch_errors(args, kwargs)
        if problems:
            raise ArgumentError(f"{self.name} cannot replay its CUDA graph:\n" + "\n".join(problems))
        output = self.replay(is_first_microbatch, args, kwargs)
        return output if isinstance(output, tuple) else (output,)

    def replay(self, is_first_microbatch: bool, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Replay on arguments that were compared already; return what ``func`` returns."""
        if self._guard is not None:
            self._guard.check()
        self._session.follow_rng_tracker()
        inputs = tensors_of(args, {name: kwargs[name] for name in self.call.kwargs})
        outputs = replay_runner(self, is_first_microbatch, *inputs, *self.params_to_backprop)
        # Nothing says when what no graph reads was read, and later replays write there. With grad that is so from the
        # backward pass on: what leaves the layers may be kept for longer, as a loss is for the log.
        if self.is_last_layer or not torch.is_grad_enabled():
            outputs = tuple(each.clone() if i in self._unread_outputs else each for i, each in enumerate(outputs))
        if any(output.requires_grad for output in outputs):
            self.status = _GraphStatus.BWD_READY
            self._session.turns.begin(self.turn)
        return with_tensors(self.call.returned, iter(outputs))

    def begin_forward(self, is_first_microbatch: bool) -> tuple[LocalReplay, ReplayOptions | None]:
        """Make ready for a replay of the forward graph and return what replays it, and how.

        Raises:
            RuntimeError: there is no graph, the backward pass comes next, or the replay would overwrite what other
                runners wait for.
        """
        slot = self.call.slot
        if self._replay is None or slot is None:
            raise CallOrderError(f"{self.name} has no CUDA graph to replay: it was not captured, or deleted")
        self.expect(_GraphStatus.FWD_READY)
        self._session.turns.check_forward(self.turn)
        if slot.quantized is None:
            return self._replay, None
        return self._replay, ReplayOptions(after_backward=slot.quantized.before_forward(is_first_microbatch))

    def begin_backward(self) -> None:
        """Make ready for a replay of the backward graph.

        Raises:
            RuntimeError: the graphs were deleted after the forward pass, the forward pass comes next, or the replay
                would overwrite what other runners wait for.
        """
        if self._replay is None:
            raise CallOrderError(
                f"{self.name}: its CUDA graphs were deleted after the forward pass, so there is no backward graph. "
                "Call delete_cuda_graphs() between steps."
            )
        self.expect(_GraphStatus.BWD_READY)
        self._session.turns.check_backward(self.turn)

    def end_backward(self) -> None:
        """Note that the backward graph was replayed: weight gradients are complete after this point of the stream."""
        event = self.bwd_graph_replay_complete_event
        event.record()
        for param in self.params_to_backprop:
            param._cudagraph_wgrad_ready_event = event
        self.status = _GraphStatus.FWD_READY
        self._session.turns.end(self.turn)
        self.call.sharded.end_backward_replay()

    # --------------------------------------------------------------------------------- for callers of megatron-core's

    def get_arg_metas(self, args: Any, kwargs: dict[str, Any] | None = None) -> list[ArgMetadata]:
        """Return the descriptions of tensors among described arguments."""
        return metas_of(args, kwargs)

    def get_tensors(
        self, args: Any, kwargs: dict[str, Any] | None = None, check_types: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors among the arguments, those in dataclasses and containers too.

        Raises:
            ArgumentTypeError: with ``check_types``, an argument is of a type that no graph takes.
        """
        if check_types:
            for value in [args] if isinstance(args, torch.Tensor) else [*(args or ()), *(kwargs or {}).values()]:
                _check_supported_type(ArgMetadata(value))
        return tensors_of(args, kwargs)

    def to_list(self, x: Any) -> list[Any]:
        """Return a tensor in a list, and what can be iterated over as one."""
        return [x] if isinstance(x, torch.Tensor) else list(x)


def _as_meta(value: Any) -> ArgMetadata:
    return value if isinstance(value, ArgMetadata) else ArgMetadata(value)
