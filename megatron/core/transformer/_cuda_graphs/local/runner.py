"""One module, or function of one, for one micro-batch as CUDA graphs that its first training step recorded."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from .. import state
from ..engine.capture import Capture, not_recording
from ..engine.capture_time_hooks import CaptureTimeHooks
from ..engine.connected_leaves import connected_leaves
from ..engine.preserve import preserve_buffers, preserve_moe_metrics
from ..engine.quantization import Quantization, QuantizedReplay, current_quantization
from ..engine.replay import ReplayOptions
from ..engine.rng import current_rng_state, use_rng_state
from ..engine.slot import CaptureOptions, GraphedSlot, WarmupRecord
from .arguments import (
    ArgMetadata,
    CudagraphBufferMetadata,
    _check_supported_type,
    described,
    metas_of,
    tensors_of,
    with_tensors,
)
from .forward_only import Evaluation, written_state
from .main_grads import accumulate_into_main_grads, scratch_main_grads, track_fused_accumulation
from .mismatch import mismatches
from .nodes import LocalReplay, _CudagraphRecordNode, _GraphStatus, replay_runner
from .pool import hold_pool
from .record import _CudagraphGlobalRecord
from .session import CaptureSession
from .sharded_weights import ShardedWeights
from .turns import Turn


class _CudaGraphRunner(torch.nn.Module):
    """Runs ``func`` of ``base_module`` eagerly while a step is recorded, and as CUDA graphs from then on.

    It serves one micro-batch at a time: from a forward pass to its backward pass it is busy. Its ``CudaGraphManager``
    makes as many as are busy at once.

    Args:
        base_module: The module whose parameters ``func`` uses.
        mempool: The memory pool of the graphs, a handle of ``torch.cuda.graph_pool_handle``.
        fwd_graph_input_args, fwd_graph_input_kwargs: Arguments of the call to record; calls to replay must be like it.
        func: What to run; None for the module's own call. With a function the base may be any object: the modules
            among its attributes are those that the function uses.
        need_backward: Whether gradients may be wanted; without, graphs are captured under ``torch.no_grad``.
        cache_key: The key by which the manager finds it; None if it is found by its arguments.

    Attributes:
        status: Which pass comes next.
        fwd_graph_recorded, bwd_graph_recorded: Whether a pass was recorded, for its graph to be captured.
        cudagraph_created: Whether the graphs are there.
        fwd_graph, bwd_graph: The graphs, if they were captured. To delete either, or assign None, frees both.
        grad_enabled: Whether there is a backward graph, or will be.
        is_frozen: Whether the recorded call had nothing to differentiate.
        is_forward_only: Whether grad was off in the recorded call, though gradients may be wanted.
        changes_state: Whether the forward graph writes buffers of the module, or metrics of MoE layers.
        evaluation: Whether the forward graph may serve evaluation.
        is_first_layer, is_last_layer: Whether the module is the first, or last, of its model chunk; true where
            ``annotate_first_last_layer`` has not said.
        params_to_backprop: The parameters that get a gradient.
        fwd_graph_input_arg_metas, fwd_graph_input_kwarg_metas: Descriptions of the arguments.
        num_warmup_steps: How often the module runs before capture, to warm up.
        backward_retain_grad: Whether the backward pass keeps autograd's graph (``cuda_graph_retain_backward_graph``).
        function: What it runs, for comparison with other runners.
        turn: When its passes are due, once they were captured.
        backward_pass: Which of autograd's backward passes recorded its own; others of the same pass share it.
        module: ``base_module``, or what stands for it if that is no module.
        parts: The modules that run in the forward graph.

    Raises:
        ValueError: the module's configuration asks for what local graphs cannot do.
        TypeError: an argument is of a type that no graph takes.
    """

    # torch.nn.Module's __setattr__ looks for parameters and submodules, which takes time in every replay.
    __setattr__ = object.__setattr__

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
        torch.nn.Module.__setattr__(self, "base_module", base_module)
        self.module = _module_of(base_module)
        self.backward_pass = -1
        self._shared_params: tuple[torch.Tensor, ...] = ()
        self.mempool = mempool
        self.cache_key = cache_key
        for value in (*fwd_graph_input_args, *fwd_graph_input_kwargs.values()):
            _check_supported_type(ArgMetadata(value))
        self.fwd_graph_input_arg_metas = [_meta_of_argument(value) for value in fwd_graph_input_args]
        self.fwd_graph_input_kwarg_metas = {
            name: _meta_of_argument(value) for name, value in fwd_graph_input_kwargs.items()
        }
        self.function: tuple = (base_module, func)
        self.func = func or (lambda *args, **kwargs: torch.nn.Module.__call__(base_module, *args, **kwargs))
        self.grad_enabled = need_backward and torch.is_grad_enabled()
        self.is_forward_only = need_backward and not torch.is_grad_enabled()
        self.changes_state = False
        self.evaluation = Evaluation()
        self._unread_outputs: set[int] = set()
        self.status = _GraphStatus.FWD_READY
        self.fwd_graph_recorded = self.bwd_graph_recorded = self.cudagraph_created = False
        self.is_first_layer = getattr(base_module, "is_first_layer", True)  # annotate_first_last_layer says so
        self.is_last_layer = getattr(base_module, "is_last_layer", True)
        config = getattr(base_module, "config", None)
        self.num_warmup_steps = getattr(config, "cuda_graph_warmup_steps", 0)
        self.backward_retain_grad = getattr(config, "cuda_graph_retain_backward_graph", False)
        self.fp8_enabled = getattr(config, "fp8", None) is not None
        self.fp4_enabled = getattr(config, "fp4", None) is not None
        self.params_to_backprop: tuple[torch.nn.Parameter, ...] = ()
        self._returned: Any = None
        self.bwd_graph_replay_complete_event = torch.cuda.Event()
        self.is_frozen = False
        self.turn = Turn()
        self._session = _CudagraphGlobalRecord.session
        self._sharded = ShardedWeights(self.module)
        self._slot: GraphedSlot | None = None
        self._replay: LocalReplay | None = None
        self._quantization: Quantization | None = None
        self._quantized: QuantizedReplay | None = None
        self._escaping: set[int] = set()
        self._warmup = WarmupRecord()
        self._input_metas: list[ArgMetadata] = []
        self._output_metas: list[ArgMetadata] = []
        self._writes_inputs = False
        self.parts: tuple[torch.nn.Module, ...] = ()
        self._rng_state = current_rng_state()
        self._autocast: Callable[[], AbstractContextManager] = nullcontext
        self._output_addresses: list[int] = []
        self._input_surface: tuple[torch.Tensor, ...] = ()
        self._fwd_graph: Any = None
        self._bwd_graph: Any = None

    @property
    def name(self) -> str:
        """What errors and profiles call the runner."""
        number = getattr(self.base_module, "layer_number", None)
        own = "" if not hasattr(self.func, "__name__") or self.func.__name__ == "<lambda>" else f".{self.func.__name__}"
        return f"{'' if number is None else f'layer {number} '}({type(self.base_module).__name__}){own}"

    def __str__(self) -> str:
        metas = metas_of(self.fwd_graph_input_arg_metas, self.fwd_graph_input_kwarg_metas)
        return f"{self.name} on {', '.join(str(tuple(meta.shape)) for meta in metas if meta.is_tensor) or 'no tensors'}"

    @property
    def fwd_graph(self) -> Any:
        """The forward graph, if it was captured."""
        return self._fwd_graph

    @fwd_graph.setter
    def fwd_graph(self, graph: Any) -> None:
        self._fwd_graph = graph
        if graph is None:
            self._free_graphs()

    @fwd_graph.deleter
    def fwd_graph(self) -> None:
        self._free_graphs()

    @property
    def bwd_graph(self) -> Any:
        """The backward graph, if it was captured."""
        return self._bwd_graph

    @bwd_graph.setter
    def bwd_graph(self, graph: Any) -> None:
        self._bwd_graph = graph
        if graph is None:
            self._free_graphs()

    @bwd_graph.deleter
    def bwd_graph(self) -> None:
        self._free_graphs()

    @property
    def gtp_remat(self) -> bool:
        """Whether weights of the module are sharded over ranks (``--tensor-parallel-num-weight-shards``)."""
        return bool(self._sharded)

    def expect(self, status: _GraphStatus) -> None:
        """Refuse a pass that is not due.

        Raises:
            RuntimeError: the other pass comes next.
        """
        if self.status is not status:
            due, called = ("backward", "forward") if status is _GraphStatus.FWD_READY else ("forward", "backward")
            raise RuntimeError(f"{self.name}: a {called} pass, but its {due} pass comes next")

    def get_quantization_context(self) -> AbstractContextManager:
        """The context of FP8 or FP4 in which the recorded call ran; none without quantization."""
        return nullcontext() if self._quantization is None else self._quantization.autocast(0)

    # ------------------------------------------------------------------------------------------------ recording

    def record_graph_capture(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run eagerly, and record the first call and its backward pass. Returns what ``func`` returns."""
        output = self.func(*args, **kwargs)
        differentiable = [tensor for tensor in tensors_of(output) if tensor.requires_grad] if self.grad_enabled else []
        if differentiable and torch.is_grad_enabled():
            noted = _CudagraphRecordNode.apply(self, *differentiable)
            noted = iter((noted,) if len(differentiable) == 1 else noted)
            output = with_tensors(
                output, iter([next(noted) if tensor.requires_grad else tensor for tensor in tensors_of(output)])
            )
            self.status = _GraphStatus.BWD_READY
        if not self.fwd_graph_recorded:
            self.is_frozen = torch.is_grad_enabled() and not differentiable
            self.apply_cudagraph_record_metadata(args, kwargs, output)
            self._quantization = current_quantization()
            self._rng_state = current_rng_state()
            self._autocast = _autocast_in_force(tensors_of(args, kwargs))
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

    # -------------------------------------------------------------------------------------------------- capture

    def begin_capture(self, session: CaptureSession, warmup: WarmupRecord) -> None:
        """Prepare for a capture.

        Args:
            session: What is shared with the runners of the same capture.
            warmup: What passes of the same function have shown, or will show; shared with its other runners.
        """
        self._session = session
        self.grad_enabled = self.bwd_graph_recorded
        self._warmup = warmup

    def share_params(self, params: Sequence[torch.Tensor]) -> None:
        """Leave the gradients of ``params`` to autograd: other runners give them one in the same backward pass."""
        self._shared_params = tuple(params)

    def warm_up(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run forward and backward ``num_warmup_steps`` times on ``inputs``; nothing that they compute is kept.

        Returns:
            The parameters that got a gradient; all of them where nothing ran.
        """
        slot = self._new_slot(inputs)
        trained = slot.params
        undisturbed = preserve_buffers([self.module]) if self.grad_enabled else nullcontext()
        with (
            self._capture_context(),
            undisturbed,
            preserve_moe_metrics(),
            scratch_main_grads((*slot.params, *self._sharded.with_neighbors())),
            _warming_up(),
        ):
            for _ in range(self._sharded.warmup_steps(self.num_warmup_steps)):
                with self._as_recorded():
                    slot.forward(self._sharded.forward(not_recording))
                self._check_leaves(slot)
                if self.grad_enabled:
                    backward = self._sharded.backward(not_recording, finalizes=False)
                    slot.backward(backward, lambda outputs: tuple(map(torch.zeros_like, outputs)))
                    trained = slot.trained_params
                slot.drop_results()
            self._sharded.settle()
        return trained

    def create_fwd_graph(self, args: Any, kwargs: Any, outputs: Any = None, clone_inputs: bool = True) -> None:
        """Capture the forward graph.

        Args:
            args, kwargs: The arguments, tensors or their descriptions.
            outputs: Descriptions of what the recorded call returned; None where nothing was recorded.
            clone_inputs: Whether the graph gets static inputs of its own, or reads the tensors among the arguments.
        """
        hold_pool(self.mempool)
        buffers = self._session.buffers
        given = tensors_of(args, kwargs)
        self._input_metas = metas_of(described(args), described(kwargs))
        inputs = buffers.inputs(self._input_metas) if clone_inputs else [tensor.detach() for tensor in given]
        versions = [tensor._version for tensor in inputs if not tensor.is_inference()]
        state_before = written_state(self.module)
        self._slot = slot = self._new_slot(inputs)
        profiled = torch.profiler.record_function(f"{self.name} forward for capture")
        with self._capture_context(), self._as_recorded(), profiled:
            capture = Capture(self.mempool)  # its graphs know the generator state that is in use now
            slot.forward(self._sharded.forward(capture.recording), capture.new_graph())
        self._fwd_graph = slot.forward_graph
        self._check_leaves(slot)
        if slot.delays_weight_gradients:
            raise ValueError(f"{self.name}: --delay-wgrad-compute cannot be had with --cuda-graph-impl local")
        self.changes_state = state_before != written_state(self.module)
        self._writes_inputs = versions != [tensor._version for tensor in inputs if not tensor.is_inference()]
        self._output_metas = captured = list(map(ArgMetadata, slot.outputs))
        if outputs is not None:
            self._output_metas = metas_of(outputs)
        kinds, recorded = ([(tuple(m.shape), m.dtype) for m in metas] for metas in (captured, self._output_metas))
        if kinds != recorded:
            raise RuntimeError(
                f"{self.name} returned {kinds} in capture and {recorded} when it was recorded: what it returns must "
                "not depend on whether graphs are captured"
            )
        self._output_addresses = [output.data_ptr() for output in tensors_of(slot.outputs)]
        buffers.lend_outputs(self._output_metas, slot.outputs)
        if not self.grad_enabled:  # outputs stay held: they may alias inputs and have no known last reader
            buffers.inputs_read(self._input_metas)

    def create_bwd_graph(self) -> None:
        """Capture the backward graph, after the forward graph.

        Raises:
            RuntimeError: there is no forward graph, or it was captured without grad.
        """
        slot = self._slot
        if slot is None or not self.grad_enabled:
            raise RuntimeError(f"{self.name}: no backward graph without a forward graph that was captured with grad")
        buffers = self._session.buffers
        outputs = tensors_of(slot.outputs)
        metas = [meta for meta, output in zip(self._output_metas, outputs, strict=True) if output.requires_grad]
        grads = buffers.grads_of_outputs(metas)
        capture = Capture(self.mempool)
        if self._sharded:  # autograd's graph does not show parameters of what is computed again in backward
            own = (param for part in self._warmup.ran or () for param in part.parameters(recurse=False))
            self._sharded.note_backward((*self.get_connected_params(outputs), *own))
        with (
            self._capture_context(),
            track_fused_accumulation((*slot.params, *self._sharded.with_neighbors())),
            torch.profiler.record_function(f"{self.name} backward for capture"),
        ):
            recording = self._sharded.backward(capture.recording)
            slot.backward(recording, lambda outputs: tuple(grads), capture.new_graph())
        self._bwd_graph = slot.backward_graph
        if self._output_addresses != [output.data_ptr() for output in outputs]:
            raise ValueError(
                f"{self.name} returns memory that is taken away before its backward pass and computed again elsewhere, "
                "where replays would look for it. Leave layernorm out of --recompute-modules."
            )
        self._escaping = buffers.lend_grads(self._input_metas, slot.grad_inputs)
        buffers.grads_of_outputs_read(metas, grads)  # last: a gradient may be passed on as it is
        buffers.inputs_read(self._input_metas)
        for output in outputs:
            buffers.let_go(output)
        slot.release_outputs()
        slot.release_inputs()
        slot.release_grad_outputs()
        slot.release_gradients(keep=self._escaping)

    def release_escaping_gradients(self) -> None:
        """Let later captures use the memory of the gradients that no graph reads.

        They have been read when a later backward pass of the same module runs.
        """
        if self._slot is not None and self._escaping:
            for index in self._escaping:
                self._session.buffers.let_go(self._slot.grad_inputs[index])
            self._slot.release_gradients()
            self._escaping = set()

    def finish(self) -> None:
        """Make ready to replay, once all graphs of the session are captured."""
        slot, session = self._slot, self._session
        assert slot is not None
        self.turn = session.turns.of(self)
        self._replay = slot.finish(LocalReplay)
        self._replay.share(
            session.turns,
            [
                (
                    session.static_input(tensor, self._writes_inputs),
                    session.users_of(getattr(meta, "cg_buffer_metadata", None)),
                )
                for meta, tensor in zip(self._input_metas, slot.inputs, strict=True)
            ],
        )
        is_recorded = session is not _CudagraphGlobalRecord.inference.session  # inference has its own rules
        known = [getattr(meta, "cg_buffer_metadata", None) for meta in self._output_metas if is_recorded]
        self._unread_outputs = {i for i, each in enumerate(known) if each is not None and not each.is_cudagraph_input}
        self.parts = self._warmup.ran or ()
        self._warmup = WarmupRecord()
        self.params_to_backprop = slot.params if self.bwd_graph is not None else ()
        self._input_surface = tuple(map(self._surface_of_input, self._input_metas, slot.inputs))
        self.fwd_graph_recorded = self.cudagraph_created = True

    def _surface_of_input(self, meta: ArgMetadata, tensor: torch.Tensor) -> torch.Tensor:
        known = getattr(meta, "cg_buffer_metadata", None)
        surface = tensor.detach()
        surface.can_skip_replay_copy = known is not None and not self._session.is_first_reader(known)
        return surface

    def _check_leaves(self, slot: GraphedSlot) -> None:
        """Refuse a function of parameters that are not its module's: their gradients would be lost.

        Raises:
            ValueError: there is such a parameter.
        """
        if not self.grad_enabled:
            return
        known = {id(leaf) for leaf in (*slot.inputs, *self.module.parameters())}
        for leaf in connected_leaves(tensors_of(slot.outputs)):
            if isinstance(leaf, torch.nn.Parameter) and id(leaf) not in known:
                raise ValueError(
                    f"{self.name} computes with a parameter of shape {tuple(leaf.shape)} that is neither among its "
                    f"arguments nor one of {type(self.base_module).__name__}: a CUDA graph would lose its gradient. "
                    "Give it as an argument."
                )

    def _new_slot(self, inputs: Sequence[torch.Tensor]) -> GraphedSlot:
        self._quantized = None if self._quantization is None else self._quantization.of_callable(0)
        return GraphedSlot(
            self.name,
            self._run,
            tuple(inputs),
            {},
            hooks=CaptureTimeHooks(self.name, None),
            options=CaptureOptions(allow_unused_input=True, retain_graph=self.backward_retain_grad),
            autocast=self.get_quantization_context,
            quantized=self._quantized,
            module=self.module,
            keep_param_grads=partial(accumulate_into_main_grads, shared=self._shared_params),
            warmup_record=self._warmup,
        )

    def _run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``func`` as a function of tensors that returns tensors."""
        args, kwargs = self._arguments(inputs)
        output = self.func(*args, **kwargs)
        self._returned = described(output)
        return tensors_of(output)

    def _arguments(self, inputs: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        values = [meta if meta.is_tensor else meta.value for meta in self.fwd_graph_input_arg_metas]
        named = {n: meta if meta.is_tensor else meta.value for n, meta in self.fwd_graph_input_kwarg_metas.items()}
        return with_tensors((values, named), iter(inputs))

    @contextmanager
    def _as_recorded(self) -> Iterator[None]:
        """Restore the RNG state and autocast of the recorded forward pass."""
        with use_rng_state(self._rng_state), self._autocast():
            yield

    @contextmanager
    def _capture_context(self) -> Iterator[None]:
        """Surround a pass of warm-up or capture: grad mode, and statistics of quantization preserved."""
        quantized = self._quantization.preserve_statistics([self.module]) if self._quantization else nullcontext()
        with nullcontext() if self.grad_enabled else torch.no_grad(), quantized:
            yield

    def can_differentiate(self, wants_grad: bool, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a replay on these arguments has the gradients that ``wants_grad`` asks for, or needs none."""
        if self.grad_enabled or not wants_grad:
            return True
        trained = (*tensors_of(args, kwargs), *self.module.parameters())
        return self.is_frozen and not any(tensor.requires_grad for tensor in trained)

    def can_serve_evaluation(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a call in evaluation mode, on these arguments, may be replayed now, for all that is known.

        Quantization keeps statistics of training passes. With sharded weights all layers must run alike, and some may
        have to run eagerly.
        """
        differs = self.evaluation.is_as_training is False or self.changes_state or self._quantization or self._sharded
        is_free = self.fwd_graph is not None and self.status is _GraphStatus.FWD_READY
        if differs or not is_free or self._session.turns.in_flight:
            return False
        if any(part._forward_hooks or part._forward_pre_hooks for part in self.parts):  # replays run none
            return False
        try:
            return not self.get_mismatch_errors(args, kwargs) and self._session.has_parameters_of(self.function)
        except TypeError:  # an argument that only evaluation gives
            return False

    def must_run_eagerly_without_grad(self) -> bool:
        """Whether a pass without grad may not be replayed, since only one with grad changes buffers or metrics.

        Raises:
            RuntimeError: it must not run eagerly either, as its weights are sharded.
        """
        if torch.is_grad_enabled() or not (self.changes_state and self.grad_enabled):
            return False
        if self._sharded:
            raise RuntimeError(
                f"{self.name} changes buffers in training, so a pass without grad cannot replay its CUDA graph "
                "(--cuda-graph-impl local), and weights that are sharded (--tensor-parallel-num-weight-shards) let no "
                "single layer run eagerly. Call eval() on the model before passes without grad."
            )
        return True

    def get_connected_params(self, outputs: Any) -> tuple[torch.nn.Parameter, ...]:
        """The parameters of the module from which ``outputs`` were computed, by autograd's graph, in their order."""
        leaves = {id(leaf) for leaf in connected_leaves(tensors_of(outputs))}
        return tuple(param for param in self.module.parameters() if id(param) in leaves)

    # --------------------------------------------------------------------------------------------------- replay

    def replay_graph_capture(self, is_first_microbatch: bool, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """Replay the forward graph on arguments like those at capture, with autograd.

        Returns:
            What ``func`` returned at capture, in a tuple if it was none.

        Raises:
            ValueError: arguments do not match; says which, and how.
            RuntimeError: a replay is not possible now; see ``_CudagraphReplayNode``.
        """
        self.refuse_mismatch(args, kwargs)
        return self.replay(is_first_microbatch, args, kwargs)

    def refuse_mismatch(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Refuse arguments that are not like those at capture.

        Raises:
            ValueError: says which, and how.
        """
        problems = self.get_mismatch_errors(args, kwargs)
        if problems:
            raise ValueError(f"{self.name} cannot replay its CUDA graph:\n" + "\n".join(problems))

    def replay(self, is_first_microbatch: bool, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """``replay_graph_capture`` on arguments that were compared already."""
        if self.turn.bit:  # inference does without gradient buffers
            self._session.check_parameters()
        return self.replay_checked(is_first_microbatch, args, kwargs)

    def replay_checked(self, is_first_microbatch: bool, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """``replay`` where the parameters were compared too."""
        inputs = tensors_of(args, {name: kwargs[name] for name in self.fwd_graph_input_kwarg_metas})
        outputs = replay_runner(self, is_first_microbatch, *inputs, *self.params_to_backprop)
        if not torch.is_grad_enabled():  # nothing says when what no graph reads was read: later replays write there
            outputs = tuple(each.clone() if i in self._unread_outputs else each for i, each in enumerate(outputs))
        if any(output.requires_grad for output in outputs):
            self.status = _GraphStatus.BWD_READY
            self._session.turns.begin(self.turn)
        output = with_tensors(self._returned, iter(outputs))
        return output if isinstance(output, tuple) else (output,)

    @property
    def output_addresses(self) -> set[int]:
        """Where the forward graph puts what it returns."""
        outputs = () if self._slot is None else tensors_of(self._slot.outputs)
        return {output.data_ptr() for output in outputs if output.numel()}

    @property
    def returns_tuple(self) -> bool:
        """Whether ``func`` itself returns a tuple."""
        return isinstance(self._returned, tuple)

    def begin_forward(self) -> LocalReplay:
        """Make ready for a replay of the forward graph and return what replays it.

        Raises:
            RuntimeError: there is no graph, the backward pass comes next, or the replay would overwrite what other
                runners wait for.
        """
        if self._replay is None:
            raise RuntimeError(f"{self.name} has no CUDA graph to replay: it was not captured, or deleted")
        self.expect(_GraphStatus.FWD_READY)
        self._session.turns.check_forward(self.turn)
        return self._replay

    def replay_options(self, is_first_microbatch: bool) -> ReplayOptions | None:
        """What the replay needs besides its inputs."""
        if self._quantized is None:
            return None
        return ReplayOptions(ends_quantization=self._quantized.before_forward(is_first_microbatch))

    def begin_backward(self) -> None:
        """Make ready for a replay of the backward graph.

        Raises:
            RuntimeError: the forward pass comes next, or the replay would overwrite what other runners wait for.
        """
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
        self._sharded.end_backward_replay()

    # ----------------------------------------------------------------------------------- what else is asked of it

    @property
    def fwd_graph_input_surface(self) -> tuple[torch.Tensor, ...]:
        """The static inputs, then ``params_to_backprop``.

        Of an input ``can_skip_replay_copy`` says whether replays of other graphs, or an earlier input of this one, put
        the value there.
        """
        return (*self._input_surface, *self.params_to_backprop)

    @property
    def num_dgrads(self) -> int:
        """How many tensors of ``fwd_graph_input_surface`` are inputs."""
        return len(self._input_surface)

    @property
    def fwd_graph_output_surface(self) -> tuple[torch.Tensor, ...]:
        """The static outputs."""
        return () if self._slot is None else tensors_of(self._slot.outputs)

    @property
    def fwd_graph_outputs(self) -> Any:
        """What the captured call returned, with the static outputs; None before the capture."""
        return None if self._slot is None else with_tensors(self._returned, iter(self.fwd_graph_output_surface))

    @property
    def static_grad_outputs(self) -> tuple[torch.Tensor, ...]:
        """The static gradients of the outputs that take part in autograd."""
        return () if self._slot is None else tensors_of(self._slot.grad_outputs)

    @property
    def static_grad_inputs(self) -> tuple[torch.Tensor | None, ...]:
        """The static gradients of the inputs; None for an input that gets none."""
        return () if self._slot is None else self._slot.grad_inputs

    def get_mismatch_errors(self, args: tuple, kwargs: dict[str, Any]) -> list[str]:
        """Return a line for each argument that is not like the captured one; none if the graphs can be replayed."""
        grad_enabled = self.grad_enabled and torch.is_grad_enabled()
        return mismatches(args, kwargs, self.fwd_graph_input_arg_metas, self.fwd_graph_input_kwarg_metas, grad_enabled)

    def get_arg_metas(self, args: Any, kwargs: dict[str, Any] | None = None) -> list[ArgMetadata]:
        """Return the descriptions of tensors among described arguments."""
        return metas_of(args, kwargs)

    def get_tensors(
        self, args: Any, kwargs: dict[str, Any] | None = None, check_types: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors among the arguments, those in dataclasses and containers too.

        Raises:
            TypeError: with ``check_types``, an argument is of a type that no graph takes.
        """
        if check_types:
            for value in [args] if isinstance(args, torch.Tensor) else [*(args or ()), *(kwargs or {}).values()]:
                _check_supported_type(ArgMetadata(value))
        return tensors_of(args, kwargs)

    def to_list(self, x: Any) -> list[Any]:
        """Return a tensor in a list, and what can be iterated over as one."""
        return [x] if isinstance(x, torch.Tensor) else list(x)

    def reset(self) -> None:
        """Free the graphs and return to the state before recording."""
        self._free_graphs()
        self._sharded.forget()
        self._session = _CudagraphGlobalRecord.session
        self.evaluation = Evaluation()
        self._input_metas, self._output_metas = [], []
        self.fwd_graph_recorded = self.bwd_graph_recorded = self.cudagraph_created = False
        self.status = _GraphStatus.FWD_READY

    def _free_graphs(self) -> None:
        if self._slot is not None:
            for param in self._slot.params:
                if getattr(param, "_cudagraph_wgrad_ready_event", None) is self.bwd_graph_replay_complete_event:
                    del param._cudagraph_wgrad_ready_event
            self._slot.reset()
        self._slot = self._replay = self._fwd_graph = self._bwd_graph = None
        self.params_to_backprop, self._input_surface = (), ()


def _autocast_in_force(inputs: Sequence[torch.Tensor]) -> Callable[[], AbstractContextManager]:
    """Return what enters torch's autocast again as it is now for the device of ``inputs``."""
    kind = inputs[0].device.type if inputs else "cuda"
    if not torch.is_autocast_enabled(kind):
        return nullcontext
    return partial(torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False)


def _module_of(base: Any) -> torch.nn.Module:
    """The module that functions of ``base`` use: ``base`` itself, or the modules among its attributes."""
    if isinstance(base, torch.nn.Module):
        return base
    return torch.nn.ModuleList(value for value in vars(base).values() if isinstance(value, torch.nn.Module))


def _meta_of_argument(value: Any) -> ArgMetadata:
    return ArgMetadata(value if isinstance(value, torch.Tensor) else described(value))


@contextmanager
def _warming_up() -> Iterator[None]:
    state._set_warmup_start()
    try:
        yield
    finally:
        state._set_warmup_end()
