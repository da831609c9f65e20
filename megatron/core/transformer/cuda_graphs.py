"""Extends megatron-core's module ``cuda_graphs``: defines ``TECudaGraphHelper`` and exports names of ``_cuda_graphs``.

Assigning or patching a name affects every function in ``_cuda_graphs`` that uses it (see ``_ForwardingModule``).
"""

import gc
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.fsdp import FSDPModule

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.token_bounds import token_bounds
from megatron.core.utils import log_single_rank
from megatron_fsdp_cuda_graphs.overlay import extend

from ._cuda_graphs.agreement import CaptureAgreement, warn_of_failure
from ._cuda_graphs.engine.graph import make_workspaces
from ._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from ._cuda_graphs.engine.memory import release_cached_memory, reuse_across_streams
from ._cuda_graphs.errors import CallOrderError, CaptureFailedError, OptionsError
from ._cuda_graphs.flags.options import MEGATRON_FSDP, TORCH_FSDP, Options, goes_on_eagerly
from ._cuda_graphs.flags.table import allocator_problem, check
from ._cuda_graphs.te.capture_arguments import PassOrder, engine_arguments, layer_samples, pass_order
from ._cuda_graphs.te.capture_report import report_capture
from ._cuda_graphs.te.capture_state import CaptureState, InputData, Status
from ._cuda_graphs.te.layers import (
    fsdp_of,
    mtp_layers,
    set_current_microbatch,
    single_run_layers,
    unwrapped,
    vision_model_of,
)
from ._cuda_graphs.te.model import ModelGraphs
from ._cuda_graphs.te.stage import Chunk, Role, Stage
from ._cuda_graphs.te.training_calls import TrainingCalls

__all__ = [
    "TECudaGraphHelper",
    "TensorReusePool",
    "VisionTECudaGraphHelper",
    "make_graphed_callables",
    "set_current_microbatch",
]

_upstream: Any = extend(__name__)

# Functions that call these names see patches of them.
_wrap_graph_for_vision = _upstream._wrap_graph_for_vision
FREEZE_GC, _layer_is_graphable = _upstream.FREEZE_GC, _upstream._layer_is_graphable
logger = _upstream.logger
_set_capture_start, _set_capture_end = _upstream._set_capture_start, _upstream._set_capture_end
convert_schedule_table_to_order = _upstream.convert_schedule_table_to_order
get_overlap_moe_expert_parallel_comm_order = _upstream.get_overlap_moe_expert_parallel_comm_order

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def _determine_if_first_last_layer_of_this_vp_chunk(base_module: Any) -> tuple[bool, bool]:
    """Return whether ``base_module`` is the first and whether it is the last layer of its model chunk.

    megatron-core 0.19 has no such function, but annotates the layers.
    """
    return getattr(base_module, "is_first_layer", True), getattr(base_module, "is_last_layer", True)


class TensorReusePool:
    """Pool of static tensors, for code that was written for an earlier megatron-core: 0.19 has none.

    Attributes:
        tensor_strong_refs, tensor_strong_refs_dataptrs: All tensors that ``get`` has made, and their addresses.
        pool: The free tensors.
    """

    tensor_strong_refs: ClassVar[list[torch.Tensor]] = []
    tensor_strong_refs_dataptrs: ClassVar[set[int]] = set()
    pool: ClassVar[list[torch.Tensor]] = []

    def insert(self, tensor: torch.Tensor) -> None:
        """Return ``tensor`` to the pool."""
        self.pool.append(tensor)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` has the address of a tensor of this pool."""
        return tensor.data_ptr() in self.tensor_strong_refs_dataptrs

    def get(self, meta: Any) -> torch.Tensor:
        """Return a free tensor with the shape, dtype and device of ``meta``, an ``ArgMetadata``, or a new tensor."""
        for index, free in enumerate(self.pool):
            if (free.shape, free.dtype, free.device) == (meta.shape, meta.dtype, meta.device):
                return self.pool.pop(index).requires_grad_(meta.requires_grad)
        tensor: torch.Tensor = meta.zeros_like()
        self.tensor_strong_refs.append(tensor)
        self.tensor_strong_refs_dataptrs.add(tensor.data_ptr())
        return tensor


_upstream._CudagraphGlobalRecord.tensor_reuse_pool = TensorReusePool()

MAX_RECAPTURES = 8  # for other numbers of micro-batches; each takes seconds


class TECudaGraphHelper:
    """Captures the CUDA graphs of a model and attaches them to its modules.

    ``create_cudagraphs`` captures the graphs. Under ``DistributedDataParallel``, it disables the hooks that gather
    parameters and adds hooks for replays (``cuda_graph_set_manual_hooks``), unless the caller has disabled the former.
    Under Megatron-FSDP, the layers' own hooks gather parameters.
    Training loops call ``before_step`` before each step; it recaptures when needed.

    Args:
        model: The wrapped model chunks; a single chunk without virtual pipeline stages.
        config: The model's ``TransformerConfig``, with ``cuda_graph_impl="transformer_engine"``. Optional attributes:

            - ``cuda_graph_fallback``: ``error`` (the default) raises CaptureFailedError when a capture fails;
              ``eager`` warns and trains without graphs.
        seq_length: Tokens per sequence.
        micro_batch_size: Sequences per micro-batch.
        optimizers: Optimizers whose gradients are zeroed after capture.
        pg_collection: The process groups; defaults to those of ``parallel_state``.

    Raises:
        OptionsError: ``config.cuda_graph_impl`` is not ``transformer_engine``, ``config.cuda_graph_fallback`` is
            unknown, whole layers are selected with ``overlap_moe_expert_parallel_comm``, or the allocator uses
            expandable segments while NCCL registers graph memory.
        ValueError: An option that Megatron-FSDP needs for graphs is missing, an option is incompatible, or torch's
            FSDP2 shards the model.
    """

    _role = Role()

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        config: Any,
        seq_length: int,
        micro_batch_size: int,
        optimizers: Sequence[Any] = (),
        pg_collection: ProcessGroupCollection | None = None,
    ):
        if config.cuda_graph_impl != "transformer_engine":
            raise OptionsError(
                f"TECudaGraphHelper needs --cuda-graph-impl transformer_engine, got {config.cuda_graph_impl!r}"
            )
        for name, act in (
            ("cuda_graph_step_log", "log in your training loop"),
            ("cuda_graph_max_captures", "capture other shapes in your training loop"),
            ("cuda_graph_report", "read the log of the capture"),
        ):
            if hasattr(config, name):
                raise OptionsError(f"config.{name} was removed: do not set it, and {act}")
        if problem := allocator_problem():
            raise OptionsError(problem)
        sharded = [fsdp.ddp_config for chunk in model if (fsdp := fsdp_of(chunk)) is not None]
        stepping = [getattr(each, "config", None) for each in optimizers[:1]]
        sharding = MEGATRON_FSDP if sharded else None
        if any(isinstance(module, FSDPModule) for chunk in model for module in chunk.modules()):
            sharding = TORCH_FSDP
        check(Options(config, *sharded[:1], *stepping, sharding=sharding))
        self.model, self.optimizers = model, optimizers
        self.config = config
        self.seq_length, self.micro_batch_size = seq_length, micro_batch_size
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        # For subclasses written for megatron-core's helper.
        self.tp_group, self.dp_cp_group = self.pg_collection.tp, self.pg_collection.dp_cp
        self.pp_group = self.pg_collection.pp
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # imports this module

        self.p2p_communicator = P2PCommunicator(pp_group=self.pp_group, config=config)
        self.num_model_chunks = len(model)
        self.num_microbatches: int | None = None
        self._discover_layers()
        self.stage = self._new_stage()
        self.stage.log(logging.INFO, f"Found {len(self.flattened_callables)} graphable layers")
        models = [chunk.model for chunk in self.stage.chunks if chunk.layers]
        self._calls = TrainingCalls(filter(None, models))
        self._state = self._new_state()
        self._has_captured = False
        self._recaptures = 0  # for other numbers of micro-batches
        make_workspaces()  # before the first pass

    def _discover_layers(self) -> None:
        """Set the megatron-core attributes that list the layers to capture. Subclasses may select other layers.

        Attributes:
            chunks_with_decoder: The model of each chunk; None if it has no graphable layers.
            callables_per_chunk, flattened_callables: The layers to capture, per chunk and flattened.
            callables_per_chunk_is_mtp, flattened_callables_is_mtp: Whether each layer belongs to multi-token
                prediction.
            num_layers_per_chunk: The number of layers to capture in each chunk.
        """
        models = [self._role.model_of(chunk) for chunk in self.model]
        self.callables_per_chunk = [
            [layer for layer in single_run_layers(model) if _layer_is_graphable(layer, self.config)] for model in models
        ]
        per_chunk = list(zip(models, self.callables_per_chunk, strict=True))
        self.chunks_with_decoder = [model if layers else None for model, layers in per_chunk]
        self.callables_per_chunk_is_mtp = [
            [each in mtp_layers(model) for each in layers] for model, layers in per_chunk
        ]
        self.num_layers_per_chunk = [len(layers) for layers in self.callables_per_chunk]
        self.flattened_callables = [layer for layers in self.callables_per_chunk for layer in layers]
        self.flattened_callables_is_mtp = [mtp for chunk in self.callables_per_chunk_is_mtp for mtp in chunk]

    def _new_stage(self) -> Stage:
        found = zip(self.model, self.chunks_with_decoder, self.callables_per_chunk, strict=True)
        chunks = [
            Chunk(chunk, self._role.model_of(chunk) if model is None else model, layers)
            for chunk, model, layers in found
        ]
        return Stage(self.config, self.pg_collection, self.p2p_communicator, chunks, self._role)

    def _new_state(self, status: Status = Status.BEFORE_CAPTURE, not_model: str = "") -> CaptureState:
        return CaptureState(self.stage, self._calls, status, not_model)

    @property
    def model_graphs(self) -> ModelGraphs | None:
        """The graphs of the whole model, or of its first chunk; None if only its layers were captured."""
        return next(iter(self._state.models), None)

    def graphs_created(self) -> bool:
        """Return whether graphs exist."""
        return self._state.status is Status.CAPTURED

    def capture_finished(self) -> bool:
        """Call ``before_step``. Megatron's training loop calls this method before each step."""
        return self.before_step()

    def before_step(self) -> bool:
        """Capture or recapture if needed. Call this on all ranks before each step.

        If ``create_cudagraphs`` deferred the capture, it happens after the first step within the token limit.

        If the number of micro-batches changes under pipeline parallelism, a recapture deletes the graphs, zeroes
        gradients, and restores layer hooks under ``DistributedDataParallel``. After ``MAX_RECAPTURES`` recaptures, such
        a change deletes the graphs permanently. If a recapture fails and ``config.cuda_graph_fallback`` is ``eager``,
        steps run eagerly until the number changes again.

        Returns:
            Whether ``create_cudagraphs`` has run, even if there were no layers to capture.

        Raises:
            CaptureFailedError, CaptureInterruptedError: See ``create_cudagraphs``.
        """
        graphs = self._state
        graphs.adopt_rng_states()
        if graphs.microbatches not in (None, get_num_microbatches()):
            self._change_microbatches(get_num_microbatches())
        elif graphs.status is Status.DEFERRED and not token_bounds.defers_capture():
            self._recapture()
        return self._state.status is not Status.BEFORE_CAPTURE

    def _change_microbatches(self, microbatches: int) -> None:
        steps = f"steps now have {microbatches} micro-batches instead of {self._state.microbatches}"
        if self._recaptures < MAX_RECAPTURES:
            log_single_rank(logger, logging.INFO, f"Recapturing CUDA graphs, because {steps}")
            self._recaptures += 1
            self._recapture()
            self._state.microbatches = microbatches  # even after a failure, so that the next change recaptures
            return
        after = f"after {MAX_RECAPTURES} recaptures, this and all later steps run eagerly"
        log_single_rank(logger, logging.WARNING, f"{steps}; {after}")
        if self.graphs_created():
            self.delete_cuda_graphs()
        self._state = self._new_state(Status.EAGER)  # otherwise the caller would capture

    def _recapture(self, not_model: str = "") -> None:
        """Replace existing graphs by a new capture; ``not_model`` is the reason to exclude the whole model, if any."""
        if self.graphs_created():
            self.delete_cuda_graphs()
        self._state = self._new_state(not_model=not_model)  # also on a stage without layers, which joins in
        self.create_cudagraphs()

    def create_cudagraphs(self) -> None:
        """Capture the whole model, or every layer once for each micro-batch that can be in flight.

        All ranks must call this together.

        The whole model is captured if ``config.cuda_graph_layers_per_graph`` is ``model``, or if it is None and the
        graphs would match all training calls since this helper was created. With None, layers are captured if capturing
        the whole model fails.

        Without pipeline stages, nothing is captured if training ran two forward passes before their backward passes:
        the reason is logged, and training continues eagerly.

        If the last step exceeded ``--moe-alltoall-capacity-factor``, ``before_step`` or another call captures later.

        Gradients are zero afterwards. If the whole model was captured, the next evaluation captures a forward graph
        (see ``capture_for_evaluation``). A capture that fails on one rank fails on all: hooks, parameters, RNG states
        and capture flags are restored, all graphs are freed, and the model can train eagerly.

        Raises:
            CallOrderError: The graphs have been captured already, by this helper or by another one.
            CaptureFailedError: The capture failed, for example because the model is in evaluation mode, and
                ``config.cuda_graph_fallback`` is not ``eager``. The message names the rank and the layer; on that rank,
                ``__cause__`` is the original exception.
            CaptureInterruptedError: Another rank was interrupted, for example by Ctrl-C. That rank raises its own
                exception.
            RuntimeError: A rank has exited, or did not answer in time, before the capture began.
        """
        if self._state.status is Status.RELEASED:
            raise CallOrderError("CUDA graphs were released: call restore() to recapture them")
        if self._state.status is Status.CAPTURED:
            raise CallOrderError(
                "CUDA graphs have been captured already: call delete_cuda_graphs before capturing again"
            )
        if self._state.has_graphs_of_others():
            raise CallOrderError("another helper has graphs of this model: call its delete_cuda_graphs() first")
        if self._role.language and not self._has_captured and token_bounds.defers_capture():
            self._state.status = Status.DEFERRED
            self._reset_after_capture()
            return
        try:
            with self._without_gathering_hooks():
                self._capture_largest()
            return
        except CaptureFailedError as failed:
            if not goes_on_eagerly(self.config):
                raise
            warn_of_failure(failed, "Training continues without these CUDA graphs (--cuda-graph-fallback eager)")
        release_cached_memory()  # the exception's frames no longer keep tensors alive
        self._state = self._new_state(Status.EAGER)

    @contextmanager
    def _without_gathering_hooks(self) -> Iterator[None]:
        """Context manager that disables hooks of ``DistributedDataParallel`` that gather parameters.

        On exit, it enables these hooks again and, if graphs exist, adds the hooks for replays.
        """
        chunks: list[Any] = [chunk for chunk in self.model if getattr(chunk, "remove_forward_pre_hook_handles", None)]
        with ExitStack() as stack:
            for chunk in chunks:
                chunk.disable_forward_pre_hook(param_sync=False)
                stack.callback(chunk.enable_forward_pre_hook)
            yield
        if chunks and self.graphs_created():
            self.cuda_graph_set_manual_hooks()

    def _capture_largest(self) -> None:
        """Capture; fall back to layers if the whole model was chosen by default and its capture fails."""
        state = self._state
        try:
            self._capture()
            return
        except CaptureFailedError as failed:
            if not state.captures_layers_instead():
                raise
            warn_of_failure(failed, "Capturing its layers instead")
        release_cached_memory()
        self._state = self._new_state(not_model="its capture failed")
        self._capture()

    def _capture(self) -> None:
        """Capture once, with grad enabled. If any rank fails, free the graphs and raise the same error on all ranks."""
        stage, graphs = self.stage, self._state
        agreement = CaptureAgreement(stage.groups, with_other_stages=self._role.language)
        grad = torch.inference_mode(False)  # also enables grad inside torch.no_grad
        with grad, agreement.together(self._drop_graphs), self._capture_mode() as start_time:
            graphs.select_scope(agreement)  # stages without layers also vote
            graphs.status = Status.EAGER
            if not stage.layers:
                names = ", ".join(type([*unwrapped(chunk)][-1]).__name__ for chunk in self.model)
                logger.warning(
                    f"{type(self).__name__}: no graphable layers found in {names}. Training stays eager. Graphs need a "
                    "decoder with layers that --cuda-graph-modules selects"
                )
            elif graphs.scope.holds:
                shape = self.seq_length, self.micro_batch_size
                graphs.capture(agreement, shape, self._get_cuda_graph_input_data)
        if not stage.one_graph_serves_all:
            graphs.microbatches = get_num_microbatches()
        if self.graphs_created():
            self._has_captured = True
            if self._role.language:
                token_bounds.models.update(self.model)
        self._finish_capturing(start_time)

    @contextmanager
    def _capture_mode(self) -> Iterator[float]:
        """Context manager that enables capture mode and yields the start time."""
        try:
            start_time = self._start_capturing()
            with reuse_across_streams():
                token_bounds.in_force = bool(token_bounds)
                yield start_time
        finally:
            token_bounds.in_force = False
            _set_capture_end()
            if FREEZE_GC:
                gc.unfreeze()
            torch.cuda.synchronize()
            self._reset_after_capture()

    def _start_capturing(self) -> float:
        """Release cached memory, enable capture mode, and return ``time.time()``."""
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler  # these import this module
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        if MoEAuxLossAutoScaler.main_loss_backward_scale is None:  # before the first step; schedules copy to it
            MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1, device="cuda")
        MTPLossAutoScaler.set_loss_scale(MTPLossAutoScaler.main_loss_backward_scale.cuda())
        release_cached_memory()
        if FREEZE_GC:
            gc.freeze()
        _set_capture_start()
        log_single_rank(logger, logging.INFO, "Start CUDA graph capture")
        return time.time()

    def _reset_after_capture(self) -> None:
        """Zero the gradients, MoE and MTP metrics, and token counts that the capture accumulated."""
        from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        for chunk in self.model:
            chunk.zero_grad_buffer()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        get_moe_metrics_tracker().clear()
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        reset_model_temporary_tensors(self.config, self.model)

    def _finish_capturing(self, start_time: float) -> None:
        """Release cached memory, and report the capture that started at ``start_time``."""
        release_cached_memory()
        report_capture(self.stage, self._state, start_time)

    def _order(self) -> PassOrder:
        return pass_order(self.stage, [len(chunk.layers) for chunk in self.stage.chunks])

    def _get_cuda_graph_input_data(self) -> InputData:
        """Return the positional inputs and keyword arguments for ``make_graphed_callables``.

        Sets ``num_layers_per_chunk``, ``num_model_chunks`` and ``num_microbatches`` for subclasses that create inputs.
        """
        passes = self._order()
        self.num_layers_per_chunk, self.num_model_chunks = passes.num_layers_per_chunk, len(passes.num_layers_per_chunk)
        self.num_microbatches = passes.num_microbatches
        sample_args, sample_kwargs = self._get_sample_arguments(passes.order, passes.chunk_id_list)
        return sample_args, engine_arguments(self.stage, passes, sample_kwargs)

    def _get_sample_arguments(
        self, order: Sequence[float], chunk_id_list: list | None = None
    ) -> tuple[list[tuple[torch.Tensor, ...]], list[dict[str, torch.Tensor]]]:
        """Create the static inputs of each layer and micro-batch; ``num_layers_per_chunk`` must match ``order``."""
        plan = PassOrder([*order], self.num_layers_per_chunk).plan
        samples = layer_samples(self.stage, plan, self.seq_length, self.micro_batch_size)
        return [args for args, _ in samples], [kwargs for _, kwargs in samples]

    def cuda_graph_set_manual_hooks(self) -> None:
        """Register the hooks that gather parameters before each replay under ``DistributedDataParallel``."""
        for chunk in self.stage.chunks:
            if chunk.fsdp is None:
                for layer in chunk.layers:
                    layer.setup_manual_hooks(chunk.module._make_forward_pre_hook)

    def delete_cuda_graphs(self) -> None:
        """Free all graphs. The model then runs eagerly and can be captured again.

        To capture another shape, set ``seq_length`` and ``micro_batch_size`` before ``create_cudagraphs``.

        Raises:
            CallOrderError: No graphs exist.
        """
        if not self.graphs_created():
            raise CallOrderError("there are no CUDA graphs to delete: call create_cudagraphs first")
        self._drop_graphs()
        self.stage.log(logging.INFO, "Deleted all CUDA graphs")

    def _drop_graphs(self) -> None:
        if self._role.language:
            token_bounds.models.difference_update(self.model)
        self._state.delete()
        self._state = self._new_state()

    def release(self) -> None:
        """Free the model's graphs and Megatron-FSDP's communication buffers, and zero gradients.

        All ranks must call this between steps. Until ``restore``, the model runs eagerly and allocates communication
        buffers as needed; calling ``release`` again frees them. Weights, gradient buffers and optimizer states may be
        moved in the meantime.
        """
        if (
            self._state.scope.holds or self._state.status is Status.DEFERRED
        ):  # also on a stage without layers, which joins the restore
            not_model = self._state.not_model
            if self.graphs_created():
                self.delete_cuda_graphs()
            self._state = self._new_state(Status.RELEASED, not_model)
        for chunk in self.stage.chunks:
            if chunk.fsdp is not None:
                chunk.fsdp.graphs.free_buffers()  # waits for reductions
        self._reset_after_capture()
        gc.collect()
        release_cached_memory()

    def restore(self) -> None:
        """Capture the graphs that ``release`` freed, for the same shape. All ranks must call this together.

        Gradients are zero afterwards. Does nothing if no graphs were released.

        Raises:
            CaptureFailedError, CaptureInterruptedError: See ``create_cudagraphs``.
        """
        if self._state.status is Status.RELEASED:
            self._recapture(self._state.not_model)


class VisionTECudaGraphHelper(TECudaGraphHelper):
    """Captures the layers of ``vision_model.decoder`` and attaches the graphs to them.

    Use it together with the language model's ``TECudaGraphHelper``, and capture with this helper first: only the
    language model's helper zeroes gradients and metrics after capture. This helper does not communicate with other
    pipeline stages, so ranks without a vision model do not need it. Under pipeline parallelism, call ``before_step`` of
    both helpers before each step: each recaptures when the number of micro-batches changes.

    Inputs are ``[vision_seq_length, 1, hidden]``, the concatenated images of a micro-batch, without rotary embeddings.

    Args:
        model: The wrapped model chunks; the first one with a ``vision_model`` is used.
        vision_config: The vision encoder's ``TransformerConfig``, with ``cuda_graph_impl="transformer_engine"``.
        vision_seq_length: Vision tokens per micro-batch; see ``get_vision_cuda_graph_seq_length``.
        micro_batch_size: Unused: the batch dimension is 1.
        num_microbatches: Unused: each capture reads it from Megatron's calculator.
        pg_collection: The process groups; defaults to those of ``parallel_state``.

    Raises:
        OptionsError, ValueError, RuntimeError: See ``TECudaGraphHelper``.
    """

    _role = Role(
        language=False,
        model_of=vision_model_of,
        wrap=lambda graph: _wrap_graph_for_vision(graph),  # the current one, which callers may patch
    )

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        vision_config: Any,
        vision_seq_length: int,
        micro_batch_size: int,
        num_microbatches: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        with_vision = [chunk for chunk in model if vision_model_of(chunk) is not None] or list(model)
        super().__init__(with_vision[:1], vision_config, vision_seq_length, 1, pg_collection=pg_collection)
        self.num_microbatches = num_microbatches
        self.vision_model = vision_model_of(self.model[0]) if self.model else None
        self.callables, self.num_layers = self.flattened_callables, len(self.flattened_callables)
        self._interleaved = len(model) > 1

    def _order(self) -> PassOrder:
        passes = super()._order()
        # With virtual stages, more micro-batches are in flight than this chunk's own schedule implies: run all forward
        # passes first, so that every micro-batch keeps its memory.
        return replace(passes, order=sorted(passes.order, reverse=True)) if self._interleaved else passes

    def _reset_after_capture(self) -> None:
        """Do nothing: the language model's helper zeroes gradients and metrics."""

    def cuda_graph_set_manual_hooks(self) -> None:
        """Do nothing: ``DistributedDataParallel`` does not gather vision encoder parameters in hooks."""


_FOLDER = f"{__package__}._cuda_graphs."


class _ForwardingModule(ModuleType):
    """Forwards assignments to every module of ``_cuda_graphs`` that has the same object under the same name.

    This covers plain assignment, ``mock.patch`` and ``monkeypatch.setattr``, including their undo.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            for key, file in list(sys.modules.items()):
                if key.startswith(_FOLDER) and name in vars(file) and vars(file)[name] is vars(self)[name]:
                    setattr(file, name, value)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _ForwardingModule
