"""Capture: a runner warms up, and captures the passes that were recorded."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from .. import state
from ..engine.capture import Capture, not_recording
from ..engine.capture_time_hooks import CaptureTimeHooks
from ..engine.connected_leaves import connected_leaves
from ..engine.preserve import preserve_buffers, preserve_moe_metrics
from ..engine.rng import use_rng_state
from ..engine.slot import CaptureOptions, GraphedSlot, WarmupRecord
from ..errors import CallOrderError
from .arguments import ArgMetadata, described, metas_of, tensors_of, with_tensors
from .forward_only import written_state
from .main_grads import accumulate_into_main_grads, scratch_main_grads, track_fused_accumulation
from .nodes import LocalReplay
from .pool import hold_pool
from .record import _CudagraphGlobalRecord
from .runner_state import RunnerState
from .session import CaptureSession


class RunnerCapture(RunnerState):
    """Warms up, and captures the forward and the backward graph.

    A ``CaptureSession`` calls ``begin_capture`` and ``warm_up`` of all runners, then ``create_fwd_graph`` and
    ``create_bwd_graph`` in the order of the record, then ``finish``.
    """

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
            raise ValueError(f"{self.name}: --delay-wgrad-compute does not work with --cuda-graph-impl local")
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
            CallOrderError: there is no forward graph, or it was captured without grad.
        """
        slot = self._slot
        if slot is None or not self.grad_enabled:
            raise CallOrderError(f"{self.name}: no backward graph without a forward graph that was captured with grad")
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

    def get_connected_params(self, outputs: Any) -> tuple[torch.nn.Parameter, ...]:
        """The parameters of the module from which ``outputs`` were computed, by autograd's graph, in their order."""
        leaves = {id(leaf) for leaf in connected_leaves(tensors_of(outputs))}
        return tuple(param for param in self.module.parameters() if id(param) in leaves)

    @property
    def output_addresses(self) -> set[int]:
        """Where the forward graph puts what it returns."""
        outputs = () if self._slot is None else tensors_of(self._slot.outputs)
        return {output.data_ptr() for output in outputs if output.numel()}

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

    def get_quantization_context(self) -> AbstractContextManager:
        """The context of FP8 or FP4 in which the recorded call ran; none without quantization."""
        return nullcontext() if self._quantization is None else self._quantization.autocast(0)

    @contextmanager
    def _capture_context(self) -> Iterator[None]:
        """Surround a pass of warm-up or capture: grad mode, and statistics of quantization preserved."""
        quantized = self._quantization.preserve_statistics([self.module]) if self._quantization else nullcontext()
        with nullcontext() if self.grad_enabled else torch.no_grad(), quantized:
            yield


@contextmanager
def _warming_up() -> Iterator[None]:
    state._set_warmup_start()
    try:
        yield
    finally:
        state._set_warmup_end()
