"""``TECudaGraphHelper``: captures the layers of a model in CUDA graphs after the first steps of training."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import log_on_each_pipeline_stage, log_single_rank
from megatron_fsdp_cuda_graphs.allocator_check import allocator_problem

from .. import state
from ..engine.memory import release_cached_memory
from ..engine.preserve import preserve_buffers
from ..engine.rng import GraphStates, preserve_rng
from ..engine.te_engine import recover_te_engine
from ..errors import CallOrderError, CaptureFailedError, OptionsError
from ..flags.checks import check_fsdp_options
from ..flags.own import check_values, layers_per_graph
from ..flags.table import PARTS_OF_OVERLAP
from ..hooks import calls_weakly, extracted_hooks
from ..replay_conditions import ReplayConditions
from .agreement import CaptureAgreement, naming_hooks
from .attached_graphs import CapturedLayers, detach_graphs, gather_in_replays, noted_conditions, slots_of_layers
from .backends import choose_backend
from .capture_arguments import MakesArguments
from .capture_mode import EntersCaptureMode, offload_interface
from .capture_observer import CaptureObserver
from .captures_again import CapturesAgain
from .decoder_graphs import DecoderGraphs, capture_decoder
from .eager_parts import beside_whole_model, eager_parts
from .evaluation import EvaluationGraphs
from .graph_use import CAPTURE_FAILED, INTERLEAVED_PASSES, CountsUse
from .interleaved_passes import InterleavedPasses
from .joined_collectives import joined_collectives
from .layers import _layer_is_graphable, fsdp_of, language_model_layers, layer_name
from .torch_fsdp import KeptParameters, kept_parameters
from .training_calls import HiddenStatesReads, TrainingCalls
from .whole_model import ModelGraphs, capture_whole_model
from .whole_model_choice import ChoosesWholeModel

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


class TECudaGraphHelper(CountsUse, CapturesAgain, EntersCaptureMode, MakesArguments, ChoosesWholeModel):
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
            what is called with the helper and whether its graphs are about to be deleted: before that, and before each
            step, by ``capture_finished``.
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
        decoder_graphs: The graphs of all layers of the decoder, in which case these have none; None otherwise.
    """

    model_graphs: ModelGraphs | None = None
    decoder_graphs: DecoderGraphs | None = None
    _evaluation: Sequence[EvaluationGraphs] = ()
    _gradients_are_zeroed = True  # by capture
    _every_stage_captures = True  # each pipeline stage has a helper of this class
    _report_name = "capture"
    _observer = CaptureObserver()  # of the last capture
    _passes: InterleavedPasses | None = None  # where one micro-batch is in flight at a time
    _kept: Mapping[torch.nn.Module, KeptParameters] = {}  # by chunk, from the last capture of layers on
    _rng_states: GraphStates | None = None  # of the graphs that there are
    _rng_hooks: Sequence[Any] = ()

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
        check_values(config)
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
            fsdp = fsdp_of(chunk)
            if fsdp is not None:
                check_fsdp_options(config, fsdp.ddp_config)
        make_log = getattr(config, "cuda_graph_step_log", None)
        if self._logs_steps and make_log is not None:
            self._step_log = make_log()
        self._engine = choose_backend(needs_hooks=any(fsdp_of(chunk) is not None for chunk in model))
        self._discover_layers()
        if self._one_graph_serves_all() and self.chunks_with_decoder and self.chunks_with_decoder[0] is not None:
            self._passes = InterleavedPasses(self.chunks_with_decoder[0])
        if layers_per_graph(config) is None:
            if not self._whole_model_blocker():
                self._training_calls = TrainingCalls(self.chunks_with_decoder[0])
            decoders = (getattr(model, "decoder", None) for model in self.chunks_with_decoder)
            self._hidden_states_reads = HiddenStatesReads(filter(None, decoders))

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
        return language_model_layers(chunk)

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
        if self._rng_states is not None:  # some schedules call layers, not the model
            self._rng_states.adopt()
        if self._capture_finished:
            self._fit_coming_step()
        return self._capture_finished

    def graphs_created(self) -> bool:
        """Whether the layers have graphs now."""
        return self._graphs_created

    # -------------------------------------------------------------------------------------------- capture

    def _finish_capturing(self, start_time: float) -> None:
        """Release cached memory and log how long capture took."""
        release_cached_memory()
        self._capture_finished = True
        self._captures += self._graphs_created
        if not self._one_graph_serves_all():
            self._captured_microbatches = get_num_microbatches()
        if self._graphs_created:
            self._report_capture(time.time() - start_time)

    def _report_capture(self, seconds: float) -> None:
        captured = f"{sum(len(layer.cuda_graphs) for layer in self.flattened_callables)} layer graphs"
        if self.model_graphs is not None:
            captured = "the whole model"
        elif self.decoder_graphs is not None:
            captured += f" and the {len(self.decoder_graphs.module.layers)} layers of the decoder in one graph"
        log_single_rank(
            logger,
            logging.INFO,
            f"Captured {captured} with the {self._engine.name} engine in {seconds:.2f} s",
        )
        self._observer.finish(self._beside_graphs)

    def _follow_rng_tracker(self) -> None:
        """Let graphs draw from what Megatron's RNG tracker has when a model is called: no fork is open then."""
        self._rng_states = GraphStates()
        adopt = calls_weakly(self._rng_states.adopt)
        models = [model for model in self.chunks_with_decoder if model is not None]
        self._rng_hooks = [model.register_forward_pre_hook(adopt) for model in models]

    def _beside_graphs(self) -> dict[str, Any]:
        """What the report says of the model beside the graphs of its layers."""
        eager = beside_whole_model(self._evaluation)
        if self.model_graphs is None:
            models, refused = [self._layers_of(chunk)[0] for chunk in self.model], self._whole_model_refused
            eager = eager_parts(self.config, models, self.callables_per_chunk, refused, self._evaluation)
        return {
            "collectives": sum(fsdp.recorded_collectives() for fsdp in map(fsdp_of, self.model) if fsdp is not None),
            "eager": list(eager),
        }

    def create_cudagraphs(self) -> None:
        """Capture every layer, once for each micro-batch that can be in flight; or the whole model.

        The whole model is captured where ``config.cuda_graph_layers_per_graph`` asks for it, or says nothing and the
        model was called for training, since this helper was made, as its graphs can be replayed. If that fails without
        having been asked for, layers are captured.

        All ranks must call it together.

        Nothing is captured where training so far ran a backward pass after a further forward pass (without pipeline
        stages): the log says so, and it trains on eagerly.

        Gradients are zero afterwards. Under Megatron-FSDP or FSDP2 the next evaluation will capture graphs of its own,
        see ``EvaluationGraphs``. If capture fails on any rank, then on all: hooks, parameters, RNG and capture
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
            with joined_collectives(self._agreement.join):
                start_time = self._capture()
            self._agreement.finish()
        except BaseException as error:
            if self._graphs_created:  # another rank has failed, or what comes after capture
                self._delete_graphs()
            self._changed_shapes = self._captured_microbatches = None
            failed = self._agreement.failed(error)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            instead = self._captures_layers_instead(failed)
            if not (instead or self._falls_back):
                raise failed from error
            why = "as it did" if self._may_stay_eager else "--cuda-graph-fallback eager"
            outlook = "Now its layers are captured" if instead else f"Training goes on without CUDA graphs ({why})"
            if isinstance(error, CaptureFailedError):
                log_single_rank(logger, logging.WARNING, f"{failed}. {outlook}.")
            else:
                logger.warning(f"{failed}. {outlook}.", exc_info=error)
        else:
            self._finish_capturing(start_time)
            return
        release_cached_memory()  # the exception is gone, and with it what its frames held
        if instead:
            self.create_cudagraphs()
        else:
            self._capture_finished = True
            self._stays_eager = CAPTURE_FAILED

    def _capture(self) -> float:
        """Enter capture mode, capture, and leave it; return when it was entered, as ``time.time()``."""
        try:
            start_time = self._start_capturing()
            if not self.flattened_callables:
                logger.warning(f"{type(self).__name__}: no graphable layers found, nothing to capture")
            elif not self._all_stay_eager():
                if self._all_capture_whole_model():
                    self._capture_model()
                else:
                    self._capture_layers()
                self._graphs_created = True
            return start_time
        except BaseException:
            if self.config.fine_grained_activation_offloading:
                offload_interface().enable_offload()  # warm-up disables it
            raise
        finally:
            self._leave_capture_mode()

    def _all_stay_eager(self) -> bool:
        """Whether no rank captures, as training so far would make replays fail; then log why."""
        interleaved = self._passes is not None and self._passes.found()
        reason = self._agreement.objection(
            "a backward pass followed a further forward pass in training so far, and a graph serves one forward pass "
            "at a time: run each backward pass before the next forward pass to have graphs"
            if interleaved
            else ""
        )
        if reason:
            self._stays_eager = INTERLEAVED_PASSES
            self._log(logging.WARNING, f"no CUDA graphs are captured, and training goes on eagerly, because {reason}")
        return bool(reason)

    @property
    def _falls_back(self) -> bool:
        """Whether training goes on without graphs after a failed capture."""
        return self._may_stay_eager or getattr(self.config, "cuda_graph_fallback", "error") == "eager"

    def _new_agreement(self) -> CaptureAgreement:
        return CaptureAgreement(self._ranks_of_stage(), self.pg_collection.pp if self._every_stage_captures else None)

    def _ranks_of_stage(self) -> list[torch.distributed.ProcessGroup]:
        groups = self.pg_collection
        together = getattr(groups, "tp_dp_cp", None)
        return [groups.tp, groups.dp_cp] if together is None else [together]

    def _capture_model(self) -> None:
        state._set_capture_end()  # in that mode layers return what the graphs of layers do, and hooks do nothing
        fsdp: Any = fsdp_of(self.model[0])
        _free_gradients(fsdp)
        with preserve_rng(), preserve_buffers([self.model[0]]):  # once more, if that fails within
            self.model_graphs = capture_whole_model(
                self.chunks_with_decoder[0],
                fsdp.whole_model(lambda phase: self._agreement.begin(f"the whole model, {phase}")),
                self.seq_length,
                self.micro_batch_size,
                self._num_warmup_iterations(),
                self._watch_eager_passes(tokens=self.seq_length, calls=1),
            )
        self._expect_evaluation()
        self._follow_rng_tracker()
        self._observer.captured_model(self.model_graphs.passes)

    def _capture_layers(self) -> None:
        self._in_decoder = frozenset()
        self._kept = kept_parameters(self.model, self.callables_per_chunk)
        try:
            if self._all_capture_decoder():
                self._capture_decoder()
            if any(self._layers_apart):
                with ExitStack() as stack:
                    for kept in self._kept.values():
                        stack.enter_context(kept.kept())
                    self._capture_gathered_layers()
            else:
                self._observer.captured_layers((), (), (), (), {"sample_kwargs": ()})
            self._expect_evaluation()
            self._follow_rng_tracker()
        except BaseException:
            self._detach_graphs()
            raise

    def _capture_decoder(self) -> None:
        """Capture all layers of the decoder in one graph for each direction; other layers are left to the engine."""
        fsdp: Any = fsdp_of(self.model[0])
        model: Any = self.chunks_with_decoder[0]
        layers = list(model.decoder.layers)
        if self._gradients_are_zeroed:
            _free_gradients(fsdp)
        state._set_capture_end()  # in that mode layers return what the graphs of layers do, and hooks do nothing
        try:
            inputs, read = self._decoder_inputs(model)
            others = len(self.flattened_callables) - len(layers)
            with preserve_rng(), preserve_buffers([model.decoder]):  # once more, if that fails within
                self.decoder_graphs = capture_decoder(
                    model.decoder,
                    fsdp.recorded_layers(layers, lambda phase: self._agreement.begin(f"the decoder, {phase}")),
                    inputs,
                    read,
                    self._num_warmup_iterations(),
                    self._watch_eager_passes(tokens=inputs["hidden_states"].shape[0], calls=1 + others),
                )
        finally:
            state._set_capture_start()
        self._observer.captured_decoder(self.decoder_graphs)
        self._in_decoder = frozenset(layers)

    def _capture_gathered_layers(self) -> None:
        layers = tuple(layer for own in self._layers_apart for layer in own)
        sample_args, arguments = self._get_cuda_graph_input_data()
        names = [layer_name(layer, index) for index, layer in enumerate(layers)]
        self._observer.expect(arguments, names)
        # As the decoder does under sequence parallelism.
        rng = get_cuda_rng_tracker().fork() if self.config.sequence_parallel else nullcontext()
        elsewhere = {layer for chunk in self._kept for layer in chunk.modules()}
        # TransformerEngine's engine leaves warm-up's draws and buffer updates behind.
        with (
            preserve_rng(),
            preserve_buffers(layers),
            self._fsdp_capture(),
            noted_conditions(layers, elsewhere) as conditions,
            extracted_hooks(layers) as hooks,
            rng,
        ):
            if self._engine.takes_hooks:
                arguments["capture_time_hooks"] = naming_hooks(hooks, names, self._agreement)
            arguments |= self._gradient_sinks()
            arguments["pool"] = pool = torch.cuda.graph_pool_handle()
            with recover_te_engine(pool, layers, arguments.get("recipe")):
                graphs = self._engine.capture(layers, sample_args, **arguments)
            self._observer.passes_end()
        self._attach_graphs(graphs, sample_args, arguments, conditions)
        if self.config.overlap_moe_expert_parallel_comm:
            gather_in_replays(self.model, self.callables_per_chunk)
        self._observer.captured_layers(self._layers_apart, names, graphs, sample_args, arguments)

    def _attach_graphs(
        self,
        graphs: Sequence[Any],
        sample_args: Sequence[tuple],
        arguments: dict[str, Any],
        conditions: Sequence[ReplayConditions],
    ) -> None:
        """Give layers their graphs.

        Args:
            graphs: The engine's, in the order of its callables.
            sample_args: The static positional inputs of each.
            arguments: The engine's keyword arguments.
            conditions: For each layer what its passes read.
        """
        eager_passes = None
        if self.decoder_graphs is not None:
            eager_passes = self._eager_passes
        elif self._may_change_shape():
            tokens, calls = sample_args[0][0].shape[0], len(self.flattened_callables)
            eager_passes = self._watch_eager_passes(tokens, calls)
        CapturedLayers(
            self.model,
            self._layers_apart,
            slots_of_layers(self.num_layers_per_chunk, self.num_microbatches or 1),
            graphs,
            list(zip(sample_args, arguments["sample_kwargs"], strict=True)),
        ).attach(
            conditions,
            self.config.gradient_accumulation_fusion,
            None if self._one_graph_serves_all() else self.num_microbatches,
            self._may_skip_replays(),
            eager_passes,
        )

    @contextmanager
    def _fsdp_capture(self) -> Iterator[None]:
        with ExitStack() as stack:
            for chunk, layers in zip(self.model, self._layers_apart, strict=True):
                fsdp = fsdp_of(chunk)
                if fsdp is not None:
                    if self._gradients_are_zeroed:
                        _free_gradients(fsdp)
                    in_parts = self.config.overlap_moe_expert_parallel_comm
                    stack.enter_context(fsdp.capture_graphs(layers, keep_buckets=in_parts))
            yield

    # ------------------------------------------------------------------------------------------ afterwards

    def _expect_evaluation(self) -> None:
        """Let the first evaluation under Megatron-FSDP or FSDP2 capture graphs of the layers for itself."""
        self._evaluation = [
            EvaluationGraphs(
                self.config,
                sharding,
                model,
                [(layer_name(layer, index), layer) for index, layer in enumerate(layers)],
                (self.seq_length, self.micro_batch_size),
                self._quantization_arguments(),
                lambda: CaptureAgreement(self._ranks_of_stage(), None),  # later stages wait for this one's output
                self._evaluation_blocker(),
            )
            for chunk, model, layers in zip(self.model, self.chunks_with_decoder, self.callables_per_chunk, strict=True)
            if (sharding := fsdp_of(chunk) or self._kept.get(chunk)) is not None
        ]

    def _evaluation_blocker(self) -> str:
        """Say why this capture is followed by none for evaluation; empty if it is."""
        if "gradient_sinks" not in self._engine.parameters:
            return f"the {self._engine.name} engine captured the layers"
        return "" if len(self.model) == 1 else "pipeline stages have several chunks of the model each"

    def cuda_graph_set_manual_hooks(self) -> None:
        """Set the hooks by which layers under ``DistributedDataParallel`` gather parameters before each replay."""
        for chunk, layers in zip(self.model, self.callables_per_chunk, strict=True):
            if fsdp_of(chunk) is None:
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
        self._delete_graphs()

    def _delete_graphs(self) -> None:
        if self.model_graphs is not None:
            self.model_graphs.reset()
            self.model_graphs = None
        self._changed_shapes = self._captured_microbatches = self._rng_states = None
        for hook in self._rng_hooks:
            hook.remove()
        self._rng_hooks = ()
        self._detach_graphs()
        self._graphs_created = False
        self._capture_finished = False
        self._log(logging.INFO, "deleted all CUDA graphs")

    def _detach_graphs(self) -> None:
        """Free the graphs that layers have, and let Megatron-FSDP run its units eagerly."""
        for evaluation in self._evaluation:
            evaluation.reset()
        self._evaluation = ()
        if self.decoder_graphs is not None:
            self.decoder_graphs.reset()
            self.decoder_graphs = None
        for kept in self._kept.values():
            kept.release()
        detach_graphs(self.model, self.callables_per_chunk)

    def _log(self, level: int, message: str) -> None:
        log_on_each_pipeline_stage(
            logger=logger,
            tp_group=self.tp_group,
            dp_cp_group=self.dp_cp_group,
            level=level,
            msg=f"Rank {torch.distributed.get_rank()}: {message}",
        )


def _free_gradients(fsdp: Any) -> None:
    """Zero gradients before capture, as after it: those that the optimizer reads then take no memory."""
    fsdp.zero_grad_buffer()
    release_cached_memory()
