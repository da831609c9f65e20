"""``TECudaGraphHelper``: captures the layers of a model in CUDA graphs after the first steps of training."""

import gc
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.utils import log_on_each_pipeline_stage, log_single_rank
from megatron_fsdp_cuda_graphs.allocator_check import allocator_problem

from .. import state
from ..engine.addresses import AddressGuard
from ..engine.chain import Chain
from ..engine.memory import release_cached_memory
from ..engine.plan import ordered_plan
from ..engine.preserve import preserve_buffers
from ..engine.rng import preserve_rng
from ..engine.te_engine import recover_te_engine
from ..errors import ArgumentError, CallOrderError, CaptureFailedError, OptionsError
from ..flag_table import PARTS_OF_OVERLAP
from ..fsdp_checks import check_fsdp_options
from ..hooks import extracted_hooks, number_of_hooks
from ..layer_graph import LayerGraph, LayerGraphs, static_inputs
from ..own_options import FALLBACKS, WHOLE_MODEL, layers_per_graph, max_captures
from .address_guard import GuardedLayer, guard_layers
from .agreement import CaptureAgreement
from .backends import choose_backend
from .capture_observer import CaptureObserver
from .captures_again import CapturesAgain
from .consecutive_layers import consecutive, with_hooks_of_others
from .eager_parts import beside_whole_model, eager_parts
from .evaluation import EvaluationGraphs
from .graph_use import CAPTURE_FAILED, CountsUse
from .layers import _layer_is_graphable, decoder_layers, language_model_of, mtp_layers
from .order import PassOrder, convert_schedule_table_to_order, get_overlap_moe_expert_parallel_comm_order
from .sample_inputs import (
    LayerInputs,
    SampleArguments,
    attention_mask_type,
    captures_attention,
    default_kwargs,
    packed_use,
    sample_arguments,
)
from .torch_fsdp import KeptParameters
from .training_calls import NONE_SEEN, TrainingCalls
from .whole_model import ModelGraphs, against_whole_model, capture_whole_model

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

# Iterations that a layer should have had before it is captured, training steps included: as many as torch's own
# make_graphed_callables runs. (The ten or eleven that are asked for elsewhere are for torch's DistributedDataParallel.)
_WARMUP_ITERATIONS = 3


class TECudaGraphHelper(CountsUse, CapturesAgain):
    """Captures per-layer CUDA graphs of a model and attaches them to its layers.

    ``create_cudagraphs`` captures; ``cuda_graph_set_manual_hooks`` then gives layers under ``DistributedDataParallel``
    the hooks that gather parameters before a replay. Under Megatron-FSDP the layers' own hooks do that.
    ``capture_finished``, which training loops ask before each step, captures again where steps have changed.

    Args:
        model: The model's chunks, wrapped as for training; one chunk without virtual pipeline stages.
        config: The model's ``TransformerConfig``, with ``cuda_graph_impl="transformer_engine"``. An attribute
            ``cuda_graph_fallback`` of it, ``error`` if there is none, says what a failed capture does: ``error`` raises
            CaptureFailedError, ``eager`` warns, and training goes on without graphs. Another one,
            ``cuda_graph_max_captures``, says how often ``create_cudagraphs`` and ``capture_finished`` capture together.
            ``cuda_graph_report`` names a folder to which rank 0 writes what was captured. ``cuda_graph_step_log`` makes
            what is called with the helper before each step, by ``capture_finished``, and before graphs are deleted.
        seq_length: Tokens in a sequence.
        micro_batch_size: Sequences in a micro-batch.
        optimizers: Their gradients are zeroed after capture.
        pg_collection: The process groups; by default those of ``parallel_state``.

    Raises:
        OptionsError: ``config.cuda_graph_impl`` is not ``transformer_engine``, ``config.cuda_graph_fallback`` is
            unknown, whole layers are to be captured that run in parts (``overlap_moe_expert_parallel_comm``), or the
            allocator uses expandable segments while NCCL registers memory of graphs.
        ValueError: an option that Megatron-FSDP needs for graphs is missing, or one does not fit.
        RuntimeError: the selected engine cannot be imported, or cannot run Megatron-FSDP's hooks.

    Attributes:
        model_graphs: The graphs of the whole model, in which case its layers have none; None otherwise.
    """

    model_graphs: ModelGraphs | None = None
    _evaluation: Sequence[EvaluationGraphs] = ()
    _gradients_are_zeroed = True  # by capture
    _every_stage_captures = True  # each pipeline stage has a helper of this class
    _report_name = "capture"
    _observer = CaptureObserver()  # of the last capture
    _kept = KeptParameters((), ())  # from the last capture on
    _whole_model_refused = ""  # why
    _tries_whole_model = False  # though nobody asked for it
    _whole_model_failed = False  # when it was tried
    _training_calls: TrainingCalls | None = None  # of a model that may be captured as a whole

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
        if getattr(config, "cuda_graph_fallback", "error") not in FALLBACKS:
            raise OptionsError(f"--cuda-graph-fallback must be one of {FALLBACKS}, got {config.cuda_graph_fallback!r}")
        layers_per_graph(config)
        max_captures(config)
        if problem := allocator_problem():
            raise OptionsError(problem)
        if config.overlap_moe_expert_parallel_comm and not config.cuda_graph_modules:
            raise OptionsError(PARTS_OF_OVERLAP)
        self.model, self.optimizers = model, optimizers
        self.config = config
        self.seq_length, self.micro_batch_size = seq_length, micro_batch_size
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.tp_group = self.pg_collection.tp
        self.dp_cp_group = self.pg_collection.dp_cp
        self.pp_group = self.pg_collection.pp
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # imports this module

        self.p2p_communicator = P2PCommunicator(pp_group=self.pp_group, config=config)
        self.num_model_chunks = len(model)
        self.num_microbatches: int | None = None
        self._capture_finished = False
        self._graphs_created = False
        for chunk in model:
            fsdp = _fsdp_of(chunk)
            if fsdp is not None:
                check_fsdp_options(config, fsdp.ddp_config)
        make_log = getattr(config, "cuda_graph_step_log", None)
        if self._logs_steps and make_log is not None:
            self._step_log = make_log()
        self._engine = choose_backend(needs_hooks=any(_fsdp_of(chunk) is not None for chunk in model))
        self._discover_layers()
        if layers_per_graph(config) is None and not self._against_whole_model():
            self._training_calls = TrainingCalls(self.chunks_with_decoder[0])

    # --------------------------------------------------------------------------------------------- layers

    def _discover_layers(self) -> None:
        """Find the layers that can be captured, chunk by chunk."""
        self.chunks_with_decoder: list[torch.nn.Module | None] = []
        self.callables_per_chunk: list[list[torch.nn.Module]] = []
        self.callables_per_chunk_is_mtp: list[list[bool]] = []
        for chunk in self.model:
            with_decoder, layers = self._layers_of(chunk)
            graphable = [(layer, mtp) for layer, mtp in layers if _layer_is_graphable(layer, self.config)]
            self.chunks_with_decoder.append(with_decoder if graphable else None)
            self.callables_per_chunk.append([layer for layer, _ in graphable])
            self.callables_per_chunk_is_mtp.append([mtp for _, mtp in graphable])
        self.num_layers_per_chunk = [len(layers) for layers in self.callables_per_chunk]
        self.flattened_callables = [layer for layers in self.callables_per_chunk for layer in layers]
        self.flattened_callables_is_mtp = [mtp for chunk in self.callables_per_chunk_is_mtp for mtp in chunk]
        self._log(logging.INFO, f"{len(self.flattened_callables)} graphable layers")

    def _layers_of(self, chunk: torch.nn.Module) -> tuple[torch.nn.Module | None, list[tuple[torch.nn.Module, bool]]]:
        """Return the model inside ``chunk``, if any, and its layers, each with whether it belongs to MTP."""
        model = language_model_of(chunk)
        if model is None:
            return None, []
        layers = [(layer, False) for layer in decoder_layers(model)]
        # A layer that runs several times for one micro-batch would overwrite activations that its backward pass needs.
        if hasattr(model, "mtp") and not (model.config.mtp_use_repeated_layer and model.config.mtp_num_layers > 1):
            layers += [(layer, True) for layer in mtp_layers(model)]
        return model, layers

    def capture_finished(self) -> bool:
        """Whether ``create_cudagraphs`` has run, even if there were no layers to capture.

        A training loop asks on all ranks before each step, as Megatron's does. Where there are graphs that the coming
        step or the last ones do not fit, this deletes them and captures again, gradients are zero, and layers under
        ``DistributedDataParallel`` have their hooks:

        - Under pipeline parallelism: the number of micro-batches is another.
        - All ranks have trained with one other shape for ``changed_shapes.STEPS`` steps or more.

        It does so ``config.cuda_graph_max_captures - 1`` times. From then on graphs are kept for their shape, and
        deleted for good if the number of micro-batches changes.

        Raises:
            CaptureFailedError: as ``create_cudagraphs``.
        """
        self._log_step()
        if self._capture_finished:
            self._fit_coming_step()
        return self._capture_finished

    def graphs_created(self) -> bool:
        """Whether the layers have graphs now."""
        return self._graphs_created

    # --------------------------------------------------------------------------------------------- inputs

    def _get_sample_arguments(
        self, order: Sequence[float], chunk_id_list: list | None = None
    ) -> tuple[list[tuple[torch.Tensor, ...]], list[dict[str, torch.Tensor]]]:
        """Make the static inputs of each layer and micro-batch; see ``sample_inputs.sample_arguments``.

        Args:
            order: The order of passes over model chunks, or over layers if there is a ``chunk_id_list``.
            chunk_id_list: For each forward pass of ``order`` its ``[model chunk, layer of the chunk]``, counted from 0.

        Returns:
            Positional inputs and keyword inputs, by chunk of ``order``, then micro-batch, then layer.
        """
        samples = self._samples(order, chunk_id_list)
        return [args for args, _ in samples], [kwargs for _, kwargs in samples]

    def _samples(self, order: Sequence[float], chunk_id_list: list | None = None) -> list[SampleArguments]:
        inputs = LayerInputs(self.config, self.seq_length, self.micro_batch_size)
        per_chunk = self.num_layers_per_chunk
        places = [(chunk, i) for chunk, layers in enumerate(self.callables_per_chunk) for i in range(len(layers))]
        if chunk_id_list is not None:
            per_chunk = [1] * len(places)
            for step, place in zip(order, chunk_id_list, strict=True):
                if place is not None:
                    places[int(step) - 1] = tuple(place)
        models = [self.chunks_with_decoder[chunk] for chunk, _ in places]
        layers = [self.callables_per_chunk[chunk][i] for chunk, i in places]
        plan = ordered_plan(order, per_chunk, len(layers))
        return sample_arguments(
            plan,
            lambda index: inputs.make(layers[index], models[index]),
            lambda index: attention_mask_type(layers[index]),
        )

    def _get_cuda_graph_input_data(self) -> tuple[list[tuple[torch.Tensor, ...]], dict[str, Any]]:
        """Return the positional inputs and the keyword arguments of ``make_graphed_callables``."""
        passes = self._order()
        self.num_layers_per_chunk, self.num_model_chunks = passes.num_layers_per_chunk, len(passes.num_layers_per_chunk)
        self.num_microbatches = passes.num_microbatches
        sample_args, sample_kwargs = self._get_sample_arguments(passes.order, passes.chunk_id_list)
        arguments = {
            "sample_kwargs": sample_kwargs,
            "allow_unused_input": True,
            "_order": passes.order,
            "_num_layers_per_chunk": self.num_layers_per_chunk,
            "_reuse_graph_input_output_buffers": True,
            "retain_graph_in_backward": self.config.cuda_graph_retain_backward_graph,
            "num_warmup_iters": self._num_warmup_iterations(),
        }
        if all(_fsdp_of(chunk) is not None for chunk in self.model):
            # Megatron-FSDP copies each gradient to its bucket as soon as it is complete, before any other replay.
            arguments["clone_param_grads_on_return"] = False
            if "gradient_sinks" in self._engine.parameters:
                arguments["gradient_sinks"] = self._gradient_sinks()
                arguments["chains"] = self._chains(sample_kwargs)
        quantization = self._quantization_arguments()
        missing = [name for name in quantization if name not in self._engine.parameters]
        if missing and quantization["enabled"]:
            raise RuntimeError(
                f"--fp8 and --fp4 need TransformerEngine 2.19 or newer: its engine knows no {missing[0]!r}"
            )
        arguments |= quantization
        if self.config.fine_grained_activation_offloading:
            offload = _offload_interface()
            arguments["pre_warmup_hook"] = offload.disable_offload
            arguments["post_warmup_hook"] = offload.enable_offload
        return sample_args, {name: value for name, value in arguments.items() if name in self._engine.parameters}

    def _gradient_sinks(self) -> list[Any]:
        """What takes the gradients of each layer, in the order of ``flattened_callables``."""
        whole = not self.config.cuda_graph_modules
        sinks: list[Any] = []
        for chunk, layers in zip(self.model, self.callables_per_chunk, strict=True):
            fsdp: Any = _fsdp_of(chunk)
            sinks += fsdp.gradient_sinks(layers, whole)
        return sinks

    def _chains(self, sample_kwargs: Sequence[dict[str, torch.Tensor]]) -> list[Chain]:
        """The layers that are recorded together; none where something happens between layers, or around them."""
        config = self.config
        between = (config.cuda_graph_modules, config.fp8, config.fp4, config.delay_wgrad_compute)
        if any(between) or config.fine_grained_activation_offloading or not self._one_graph_serves_all():
            return []
        chains: list[Chain] = []
        limit = layers_per_graph(config)
        # Ranks whose layers were recorded otherwise would launch their collectives in another order.
        alone = self._agreement.union(with_hooks_of_others(self.flattened_callables))
        first = 0
        for chunk, with_decoder, layers in zip(
            self.model, self.chunks_with_decoder, self.callables_per_chunk, strict=True
        ):
            fsdp: Any = _fsdp_of(chunk)
            most = limit if isinstance(limit, int) else len(layers)
            decoder, own = decoder_layers(with_decoder), {index - first for index in alone}
            for piece in consecutive(decoder, layers, sample_kwargs[first:], most, own) if layers else ():
                owner = fsdp.chain([layers[i] for i in piece])
                if owner is not None:
                    chains.append(Chain([first + i for i in piece], owner))
            first += len(layers)
        return chains

    def _order(self) -> PassOrder:
        """The order of forward and backward passes of this pipeline stage."""
        from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

        num_chunks = len(self.model)
        num_microbatches = 1 if self._one_graph_serves_all() else get_num_microbatches()
        group_size = self.config.microbatch_group_size_per_vp_stage
        _, _, num_warmup_microbatches, _ = get_pp_rank_microbatches(
            num_microbatches,
            num_chunks,
            group_size,
            forward_only=False,
            p2p_communicator=self.p2p_communicator,
        )
        table = get_schedule_table(num_microbatches, num_chunks, group_size)
        chunks = convert_schedule_table_to_order(num_warmup_microbatches, num_chunks, table)
        num_layers = [len(layers) for layers in self.callables_per_chunk]
        passes = PassOrder([*chunks], num_layers, num_microbatches)
        if self.config.overlap_moe_expert_parallel_comm:
            # Layers of two chunks interleave: every layer becomes a chunk of its own.
            order, chunk_id_list = get_overlap_moe_expert_parallel_comm_order(
                chunks, num_layers, self.config.delay_wgrad_compute and self._captures_weight_gradients()
            )
            passes = PassOrder(order, [1] * sum(num_layers), order.count(1), chunk_id_list)
        self._log(logging.DEBUG, f"order of passes {passes.order}")
        return passes

    def _one_graph_serves_all(self) -> bool:
        """Whether only one micro-batch is in flight at a time, as without pipeline stages."""
        return self.pp_group.size() == 1 and not self.config.overlap_moe_expert_parallel_comm

    def _may_run_eagerly(self) -> bool:
        """Whether passes between replays may run eagerly: not where these hand on state that replays then lack."""
        config = self.config
        stateful = (config.fp8, config.fp4, config.delay_wgrad_compute, config.fine_grained_activation_offloading)
        # The token dispatcher keeps the shapes of its last pass, which the part after the graph reads.
        dispatches = {CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess} & {*config.cuda_graph_modules}
        return self._one_graph_serves_all() and not any(stateful) and not dispatches

    def _captures_weight_gradients(self) -> bool:
        modules, config = self.config.cuda_graph_modules, self.config
        shared_experts = config.moe_shared_expert_intermediate_size is not None and not config.moe_shared_expert_overlap
        return CudaGraphModule.attn in modules or (CudaGraphModule.moe_router in modules and shared_experts)

    def _num_warmup_iterations(self) -> int:
        done = self.config.cuda_graph_warmup_steps * get_num_microbatches()
        return max(1, math.ceil((_WARMUP_ITERATIONS - done) / (self.num_microbatches or 1)))

    def _quantization_arguments(self) -> dict[str, Any]:
        config = self.config
        if not (config.fp8 or config.fp4):
            return {"enabled": False}
        from megatron.core.fp4_utils import get_fp4_recipe
        from megatron.core.fp8_utils import get_fp8_recipe, is_first_last_bf16_layer

        layers = zip(self.flattened_callables, self.flattened_callables_is_mtp, strict=True)
        return {
            "enabled": tuple(
                not is_first_last_bf16_layer(config, -1 if mtp else layer.layer_number - 1) for layer, mtp in layers
            ),
            "recipe": get_fp8_recipe(config) if config.fp8 else get_fp4_recipe(config),
            # Cached copies of FP8 weights would outlive the buffers that Megatron-FSDP gathers them to.
            "cache_quantized_params": not (config.fp8_param and any(_fsdp_of(chunk) for chunk in self.model)),
            "amax_reduction_group": self._get_amax_reduction_group(
                with_context_parallel=True, tp_only_amax_red=config.tp_only_amax_red
            ),
        }

    def _get_amax_reduction_group(
        self, with_context_parallel: bool = False, tp_only_amax_red: bool = False
    ) -> torch.distributed.ProcessGroup:
        """Return the process group over which FP8 and FP4 reduce amaxes (largest absolute values).

        Args:
            with_context_parallel: Whether the group includes context-parallel ranks.
            tp_only_amax_red: Whether the group excludes data-parallel ranks.

        Raises:
            ArgumentError: ``pg_collection`` has no such group.
        """
        name = "tp" + ("" if tp_only_amax_red else "_dp") + ("_cp" if with_context_parallel else "")
        group = getattr(self.pg_collection, name, None)
        if group is None:
            raise ArgumentError(
                f"quantization reduces over the process group {name}, which pg_collection does not have"
            )
        return group

    # -------------------------------------------------------------------------------------------- capture

    def _start_capturing(self) -> float:
        """Enter capture mode; return ``time.time()``."""
        release_cached_memory(thorough=True)
        if state.FREEZE_GC:
            gc.freeze()
        state._set_capture_start()
        log_single_rank(logger, logging.INFO, "Start CUDA graph capture")
        self._observer.start()
        return time.time()

    def _leave_capture_mode(self) -> None:
        state._set_capture_end()
        if self.config.fine_grained_activation_offloading:
            _offload_interface().reset()
        if state.FREEZE_GC:
            gc.unfreeze()
        torch.cuda.synchronize()
        self._reset_after_capture()

    def _reset_after_capture(self) -> None:
        """Zero what capture accumulated: gradients, and metrics and token counts of MoE layers."""
        from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        for chunk in self.model:
            chunk.zero_grad_buffer()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        get_moe_metrics_tracker().clear()
        reset_model_temporary_tensors(self.config, self.model)

    def _finish_capturing(self, start_time: float) -> None:
        """Release cached memory and log how long capture took."""
        release_cached_memory()
        self._capture_finished = True
        self._captures += self._graphs_created
        if not self._one_graph_serves_all():
            self._captured_microbatches = get_num_microbatches()
        captured = f"{sum(len(layer.cuda_graphs) for layer in self.flattened_callables)} layer graphs"
        if self.model_graphs is not None:
            captured = "the whole model"
        log_single_rank(
            logger,
            logging.INFO,
            f"Captured {captured} with the {self._engine.name} engine in {time.time() - start_time:.2f} s",
        )
        self._observer.finish(self._beside_graphs)

    def _beside_graphs(self) -> dict[str, Any]:
        """What the report says of the model beside the graphs of its layers."""
        eager = beside_whole_model(self._evaluation)
        if self.model_graphs is None:
            models, refused = [self._layers_of(chunk)[0] for chunk in self.model], self._whole_model_refused
            eager = eager_parts(self.config, models, self.callables_per_chunk, refused, self._evaluation)
        return {
            "collectives": sum(fsdp.recorded_collectives() for fsdp in map(_fsdp_of, self.model) if fsdp is not None),
            "eager": list(eager),
        }

    def create_cudagraphs(self) -> None:
        """Capture every layer, once for each micro-batch that can be in flight; or the whole model.

        The whole model is captured where ``config.cuda_graph_layers_per_graph`` asks for it, or says nothing and the
        model was called for training, since this helper was made, as its graphs can be replayed. If that fails without
        having been asked for, layers are captured.

        All ranks must call it together.

        Gradients are zero afterwards. Under Megatron-FSDP the next evaluation will capture graphs of its own, see
        ``EvaluationGraphs``. If capture fails on any rank, then on all: hooks, parameters, RNG and capture
        flags are restored, no layer has graphs, and the model trains on eagerly.

        Raises:
            CallOrderError: the graphs have been captured already.
            CaptureFailedError: capture failed, and ``config.cuda_graph_fallback`` is not ``eager``; names the rank and
                the layer. On the rank that failed the error's ``__cause__`` is the exception.
            RuntimeError: the ranks have no store to agree over.
        """
        if self._capture_finished:
            raise CallOrderError(
                "CUDA graphs have been captured already: call delete_cuda_graphs before capturing again"
            )
        self._observer = CaptureObserver.on_rank_0(
            self._engine.name, self.config, self._report_name, self._recaptures + 1
        )
        self._agreement = self._observer.watch(self._new_agreement())
        try:
            start_time = self._capture()
            self._agreement.finish()
        except BaseException as error:
            if self._graphs_created:  # another rank has failed, or what comes after capture
                self.delete_cuda_graphs()
            self._changed_shapes = self._captured_microbatches = None
            failed = self._agreement.failed(error)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            if self._captures_layers_instead(failed):
                self.create_cudagraphs()
                return
            if not self._falls_back:
                raise failed from error
            why = "as it did" if self._may_stay_eager else "--cuda-graph-fallback eager"
            warning = f"{failed}. Training goes on without CUDA graphs ({why})."
            if isinstance(error, CaptureFailedError):
                log_single_rank(logger, logging.WARNING, warning)
            else:
                logger.warning(warning, exc_info=error)
            release_cached_memory()
            self._capture_finished = True
            self._stays_eager = CAPTURE_FAILED
            return
        self._finish_capturing(start_time)

    def _capture(self) -> float:
        """Enter capture mode, capture, and leave it; return when it was entered, as ``time.time()``."""
        try:
            start_time = self._start_capturing()
            if self.flattened_callables:
                if self._all_capture_whole_model():
                    self._capture_model()
                else:
                    self._capture_layers()
                self._graphs_created = True
            else:
                logger.warning(f"{type(self).__name__}: no graphable layers found, nothing to capture")
            return start_time
        except BaseException:
            if self.config.fine_grained_activation_offloading:
                _offload_interface().enable_offload()  # warm-up disables it
            raise
        finally:
            self._leave_capture_mode()

    @property
    def _falls_back(self) -> bool:
        """Whether training goes on without graphs after a failed capture."""
        return self._may_stay_eager or getattr(self.config, "cuda_graph_fallback", "error") == "eager"

    def _new_agreement(self) -> CaptureAgreement:
        groups = self.pg_collection
        together = getattr(groups, "tp_dp_cp", None)
        stage = [groups.tp, groups.dp_cp] if together is None else [together]
        return CaptureAgreement(stage, groups.pp if self._every_stage_captures else None)

    def _captures_whole_model(self) -> bool:
        """Whether this rank would capture the whole model."""
        return layers_per_graph(self.config) in (None, WHOLE_MODEL) and not self._against_the_model()

    def _all_capture_whole_model(self) -> bool:
        """Whether all ranks capture the whole model. If one cannot though no number of layers was given, log why."""
        wanted = layers_per_graph(self.config)
        if wanted not in (None, WHOLE_MODEL):
            return False
        reason = self._agreement.objection(self._against_the_model())
        self._whole_model_refused = reason
        self._tries_whole_model = wanted is None and not reason
        if reason:
            level = logging.INFO if wanted is None else logging.WARNING
            self._log(level, f"instead of the whole model its layers are captured, because {reason}")
        return not reason

    def _captures_layers_instead(self, failed: CaptureFailedError) -> bool:
        """Whether layers are to be captured now that the whole model could not be; that is logged."""
        if not self._tries_whole_model or failed.interrupted:
            return False
        self._tries_whole_model, self._whole_model_failed = False, True
        log_single_rank(logger, logging.WARNING, f"{failed}. The whole model was tried first; now its layers are.")
        return True

    def _against_the_model(self) -> str:
        """Say why this rank does not capture the whole model; empty if it does."""
        return self._against_whole_model() or ("" if layers_per_graph(self.config) else self._against_calls())

    def _against_calls(self) -> str:
        """Say why training would not replay graphs of the whole model, so that they are captured only if asked for."""
        if self._whole_model_failed:
            return "its capture failed"
        return NONE_SEEN if self._training_calls is None else self._training_calls.against()

    def _against_whole_model(self) -> str:
        if "gradient_sinks" not in self._engine.parameters:
            return f"the {self._engine.name} engine captures layers only"
        if not self._one_graph_serves_all() or len(self.model) != 1:
            return "several micro-batches are in flight at a time"
        fsdp = _fsdp_of(self.model[0])
        if fsdp is None:
            return "the model is not under Megatron-FSDP"
        model = self.chunks_with_decoder[0]
        if model is not None and {*fsdp.parameters()} != {*model.parameters()}:
            return f"there are parameters outside of {type(model).__name__}"
        against: str = against_whole_model(model, self.config) or fsdp.against_whole_model()
        return against

    def _capture_model(self) -> None:
        state._set_capture_end()  # in that mode layers return what the graphs of layers do, and hooks do nothing
        fsdp: Any = _fsdp_of(self.model[0])
        _free_gradients(fsdp)
        self.model_graphs = capture_whole_model(
            self.chunks_with_decoder[0],
            fsdp.whole_model(lambda phase: self._agreement.begin(f"the whole model, {phase}")),
            self.seq_length,
            self.micro_batch_size,
            self._num_warmup_iterations(),
            self._watch_eager_passes(tokens=self.seq_length, calls=1),
        )
        self._expect_evaluation()
        self._observer.captured_model(self.model_graphs.passes)

    def _capture_layers(self) -> None:
        self._kept = KeptParameters(self.model, self.flattened_callables)
        with self._kept.gathered(partial(self._agreement.begin, "before the first layer")):
            self._capture_gathered_layers()

    def _capture_gathered_layers(self) -> None:
        layers = tuple(self.flattened_callables)
        sample_args, arguments = self._get_cuda_graph_input_data()
        names = [_layer_name(layer, index) for index, layer in enumerate(layers)]
        self._observer.expect(arguments, names)
        # As the decoder does under sequence parallelism.
        rng = get_cuda_rng_tracker().fork() if self.config.sequence_parallel else nullcontext()
        # TransformerEngine's engine leaves warm-up's draws and buffer updates behind.
        with (
            preserve_rng(),
            preserve_buffers(layers),
            self._fsdp_capture(),
            extracted_hooks(layers) as hooks,
            rng,
        ):
            if self._engine.takes_hooks:
                arguments["capture_time_hooks"] = self._agreeing(hooks)
            arguments["pool"] = pool = torch.cuda.graph_pool_handle()
            with recover_te_engine(pool, layers, arguments.get("recipe")):
                graphs = self._engine.capture(layers, sample_args, **arguments)
            self._observer.passes_end()
        try:
            self._attach_graphs(graphs, sample_args, arguments)
            if self.config.overlap_moe_expert_parallel_comm:
                self._gather_in_replays()
            self._expect_evaluation()
            self._observer.captured_layers(self.callables_per_chunk, names, graphs, sample_args, arguments)
        except BaseException:
            self._detach_graphs()
            raise

    def _attach_graphs(self, graphs: Sequence[Any], sample_args: Sequence[tuple], arguments: dict[str, Any]) -> None:
        """Give layers their graphs.

        Args:
            graphs: The engine's, in the order of its callables.
            sample_args: The static positional inputs of each.
            arguments: The engine's keyword arguments.
        """
        layers = self.flattened_callables
        sample_kwargs = arguments["sample_kwargs"]
        samples = list(zip(sample_args, sample_kwargs, strict=True))
        guards = self._guards(graphs, samples, arguments.get("chains", ()))
        absent = default_kwargs(layers, sample_kwargs)
        given: dict[int, torch.Tensor | None] = {}
        eager_passes = None
        if self._may_run_eagerly():
            eager_passes = self._watch_eager_passes(tokens=sample_args[0][0].shape[0], calls=len(layers))
        slots_of = self._slots()
        first_of = {index: chain.members[0] for chain in arguments.get("chains", ()) for index in chain.members}
        for index, (layer, slots) in enumerate(zip(layers, slots_of, strict=True)):
            keywords = slots_of[first_of.get(index, index)]  # those of a chain's first layer serve all of it
            layer.cuda_graphs = LayerGraphs(
                LayerGraph(
                    _layer_name(layer, index),
                    graphs[slot],
                    sample_args[slot],
                    {name: sample_kwargs[keyword_slot][name] for name in sample_kwargs[slot]},
                    has_attention=captures_attention(layer),
                    num_microbatches=None if self._one_graph_serves_all() else self.num_microbatches,
                    absent=absent[keyword_slot],
                    given=given,
                    keeps_values=len(self.model) > 1,  # only the first and the last chunk of a model read batches
                    guard=guards[index],
                    recorded_hooks=number_of_hooks(layer) if index in first_of else None,
                    eager_passes=eager_passes,
                    packed=packed_use(layer),
                )
                for slot, keyword_slot in zip(slots, keywords, strict=True)
            )

    def _gather_in_replays(self) -> None:
        """Let replays gather parameters under Megatron-FSDP: the schedule does not call layers, and no hooks run."""
        for chunk, layers in zip(self.model, self.callables_per_chunk, strict=True):
            fsdp = _fsdp_of(chunk)
            if fsdp is not None:
                for layer in layers:
                    wrap = partial(fsdp.around_parts, layer)
                    layer.cuda_graphs = LayerGraphs(graph.wrapped(wrap) for graph in layer.cuda_graphs)

    def _agreeing(self, hooks: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
        """Return ``hooks`` of the layers with one in front that waits until all ranks begin this pass of the layer."""
        with_votes = []
        for index, (layer, own) in enumerate(zip(self.flattened_callables, hooks, strict=True)):
            name, kinds = _layer_name(layer, index), dict(own or {})
            for kind, phase in (("forward_pre_hooks", "forward"), ("backward_pre_hooks", "backward")):
                vote = partial(self._agreement.begin, f"{name}, {phase}")
                kinds[kind] = {"agreement": vote, **kinds.get(kind, {})}
            with_votes.append(kinds)
        return with_votes

    def _guards(
        self, graphs: Sequence[Any], samples: Sequence[SampleArguments], chains: Sequence[Chain]
    ) -> list[AddressGuard | None]:
        """Return a guard for each layer, None for layers with nothing to guard.

        That of a chain's first layer guards all of the chain. Megatron-FSDP guards parameters itself.
        """
        fused = self.config.gradient_accumulation_fusion
        layers: list[GuardedLayer] = []
        for chunk, own in zip(self.model, self.callables_per_chunk, strict=True):
            alone = _fsdp_of(chunk) is None
            for layer in own:
                layers.append(GuardedLayer(_layer_name(layer, len(layers)), layer, alone, alone and fused))
        members = {chain.members[0]: chain.members for chain in chains}
        followers = {index for chain in chains for index in chain.members[1:]}
        guards: list[AddressGuard | None] = []
        guarded: set[int] = set()  # layers share static inputs
        for index, slots in enumerate(self._slots()):
            inputs = []
            for slot in slots if index not in followers else ():
                for name, tensor in static_inputs(graphs[slot], *samples[slot]):
                    if id(tensor) not in guarded:
                        guarded.add(id(tensor))
                        inputs.append((f"{name} of {layers[index].name}", tensor))
            together = [] if index in followers else [layers[i] for i in members.get(index, [index])]
            guards.append(guard_layers(together, inputs))
        return guards

    @contextmanager
    def _fsdp_capture(self) -> Iterator[None]:
        with ExitStack() as stack:
            for chunk, layers in zip(self.model, self.callables_per_chunk, strict=True):
                fsdp = _fsdp_of(chunk)
                if fsdp is not None:
                    if self._gradients_are_zeroed:
                        _free_gradients(fsdp)
                    ready = partial(self._agreement.begin, "before the first layer")
                    in_parts = self.config.overlap_moe_expert_parallel_comm
                    stack.enter_context(fsdp.capture_graphs(layers, ready, keep_buckets=in_parts))
            yield

    def _slots(self) -> list[range]:
        """Return for each layer the indices of its micro-batches among the captured callables."""
        count = self.num_microbatches or 1
        slots: list[range] = []
        for layers in self.num_layers_per_chunk:
            first = len(slots) * count
            slots += [range(first + layer, first + layers * count, layers) for layer in range(layers)]
        return slots

    # ------------------------------------------------------------------------------------------ afterwards

    def _expect_evaluation(self) -> None:
        """Let the first evaluation under Megatron-FSDP capture graphs of the layers for itself."""
        self._evaluation = [
            EvaluationGraphs(
                self.config,
                fsdp,
                [(_layer_name(layer, index), layer) for index, layer in enumerate(layers)],
                partial(LayerInputs(self.config, self.seq_length, self.micro_batch_size).make, model=model),
                self._new_agreement,
                self._against_evaluation(),
            )
            for chunk, model, layers in zip(self.model, self.chunks_with_decoder, self.callables_per_chunk, strict=True)
            if (fsdp := _fsdp_of(chunk)) is not None
        ]

    def _against_evaluation(self) -> str:
        """Say why this capture is followed by none for evaluation; empty if it is."""
        if "gradient_sinks" not in self._engine.parameters:
            return f"the {self._engine.name} engine captured the layers"
        return "" if self._one_graph_serves_all() else "several micro-batches are in flight at a time"

    def cuda_graph_set_manual_hooks(self) -> None:
        """Set the hooks by which layers under ``DistributedDataParallel`` gather parameters before each replay."""
        for chunk, layers in zip(self.model, self.callables_per_chunk, strict=True):
            if _fsdp_of(chunk) is None:
                for layer in layers:
                    layer.setup_manual_hooks(chunk._make_forward_pre_hook)

    def delete_cuda_graphs(self) -> None:
        """Free all graphs, those for evaluation too; the layers then run eagerly, and can be captured again.

        Raises:
            CallOrderError: there are no graphs.
        """
        if not self._graphs_created:
            raise CallOrderError("there are no CUDA graphs to delete: call create_cudagraphs first")
        self._count_before_deletion()
        if self.model_graphs is not None:
            self.model_graphs.reset()
            self.model_graphs = None
        self._changed_shapes = self._captured_microbatches = None
        self._detach_graphs()
        self._graphs_created = False
        self._capture_finished = False
        self._log(logging.INFO, "deleted all CUDA graphs")

    def _detach_graphs(self) -> None:
        """Free the graphs that layers have, and let Megatron-FSDP run its units eagerly."""
        for evaluation in self._evaluation:
            evaluation.reset()
        self._evaluation = ()
        self._kept.release()
        for chunk, layers in zip(self.model, self.callables_per_chunk, strict=True):
            attached = [layer for layer in layers if getattr(layer, "cuda_graphs", None)]
            for layer in attached:
                for graph in layer.cuda_graphs:
                    graph.reset()
                layer.cuda_graphs = []
                layer.cuda_graph_manual_hooks = []
            fsdp = _fsdp_of(chunk)
            if fsdp is not None:
                fsdp.forget_graphs(layers)

    def _log(self, level: int, message: str) -> None:
        log_on_each_pipeline_stage(
            logger=logger,
            tp_group=self.tp_group,
            dp_cp_group=self.dp_cp_group,
            level=level,
            msg=f"Rank {torch.distributed.get_rank()}: {message}",
        )


def _fsdp_of(chunk: torch.nn.Module) -> Any | None:
    """The ``MegatronFSDP`` among the wrappers of a model chunk, or None."""
    module: Any = chunk
    while module is not None:
        if hasattr(module, "capture_graphs"):
            return module
        module = getattr(module, "module", None)
    return None


def _free_gradients(fsdp: Any) -> None:
    """Zero gradients before capture, as after it: those that the optimizer reads then take no memory."""
    fsdp.zero_grad_buffer()
    release_cached_memory()


def _layer_name(layer: torch.nn.Module, index: int) -> str:
    return f"layer {getattr(layer, 'layer_number', index + 1)} ({type(layer).__name__})"


def _offload_interface() -> Any:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface,
    )

    return FineGrainedActivationOffloadingInterface
