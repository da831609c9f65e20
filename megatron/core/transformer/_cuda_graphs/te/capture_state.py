"""Select, capture and own the graphs of a pipeline stage: of the whole model, or of each layer."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from ..agreement import CaptureAgreement
from ..engine.graph import preserve_buffers
from ..engine.make_graphed_callables import make_graphed_callables
from ..engine.memory import release_cached_memory
from ..engine.rng import GraphStates, preserve_rng
from ..errors import CallOrderError
from ..flags.options import LAYERS_FLAG, WHOLE_MODEL, Options, layers_per_graph
from ..hooks import extracted_hooks, has_other_hooks, has_own_hooks
from ..replacements import between
from ..snapshot import Snapshot, module_aspects, named, refuse_changed_attributes
from .attached_graphs import attach_graphs, detach_graphs
from .capture_arguments import PassOrder, num_warmup_iterations, pass_order, recorded_quantization
from .layers import (
    decoder_layers,
    has_forward_of,
    language_layers,
    layer_name,
    refuse_skipped_forward,
    why_not_graphable,
)
from .model import ModelGraphs, capture_for_evaluation, capture_models
from .sample_inputs import attention_mask_type
from .stage import Chunk, Stage
from .training_calls import TrainingCalls

InputData = tuple[list[tuple[torch.Tensor, ...]], dict[str, Any]]


class Status(Enum):
    """Whether a pipeline stage has graphs."""

    BEFORE_CAPTURE = "not captured yet"
    DEFERRED = "captured after the next step within --moe-alltoall-capacity-factor"
    CAPTURED = "captured"
    EAGER = "not captured: a capture failed, is impossible, or is no longer allowed"
    RELEASED = "released until they are restored"


class Holds(Enum):
    """The part of a model captured in one graph."""

    MODEL = "the model"
    LAYER = "a layer"


def blocker(stage: Stage) -> str:
    """Return why this rank cannot capture the whole model; empty if it can.

    In a pipeline, each chunk and micro-batch has its own graph.
    """
    return next((reason for chunk in stage.chunks for reason in _model_blockers(stage, chunk) if reason), "")


def _model_blockers(stage: Stage, chunk: Chunk) -> Iterator[str]:
    """Yield reasons why the model of ``chunk`` cannot be captured; each assumes that earlier ones do not apply."""
    config, model = stage.config, chunk.model
    if chunk.fsdp is None:
        yield "the model is not under Megatron-FSDP"
    if model is not None and {*chunk.fsdp.parameters()} != {*model.parameters()}:
        yield f"there are parameters outside of {type(model).__name__}"
    if known_class(model) is None:
        yield f"{type(model).__name__} is not a GPTModel or HybridModel with an unmodified forward"
    repeated = {*language_layers(model)} - {*chunk.every_layer}
    captured = {*chunk.every_layer} <= {*chunk.layers} and not any(why_not_graphable(each, config) for each in repeated)
    if not (decoder_layers(model) and captured):
        yield "not all layers can be captured"
    if len({*map(attention_mask_type, language_layers(chunk.model))} - {None}) > 1:
        yield "layers have different attention masks"
    if config.cuda_graph_modules:
        yield "only modules of layers are captured (--cuda-graph-modules)"
    if Options(config).quantizes_otherwise:
        yield "FP4, or an --fp8-recipe other than delayed or tensorwise, is used"
    if config.cuda_graph_retain_backward_graph:
        yield "the backward pass keeps autograd's graph (cuda_graph_retain_backward_graph)"
    if config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te":
        yield "TransformerEngine's cross entropy reads values on the host: use --cross-entropy-fusion-impl native"
    # Hooks inside a layer are recorded with it, as when the layer is captured individually.
    inside = {child for layer in language_layers(model) for child in layer.modules() if child is not layer}
    yield _hooked((name, module) for name, module in model.named_modules() if name and module not in inside)
    yield chunk.fsdp.graphs.whole_model_blocker()


def known_class(model: Any) -> type | None:
    """Return ``GPTModel`` or ``HybridModel`` if ``model`` uses its unmodified ``forward``, or None."""
    from megatron.core.models.gpt.gpt_model import GPTModel  # these import cuda_graphs, which imports this module
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return next((kind for kind in (GPTModel, HybridModel) if has_forward_of(model, kind)), None)


def other_method(model: Any) -> str:
    """Return a message that names a method that ``model`` overrides; empty if there is none.

    An override may read state that changes between steps. Methods named after ``state_dict`` are ignored.
    """
    from megatron.core.models.common.language_module.language_module import LanguageModule

    known: Any = known_class(model)
    for kind in (known, LanguageModule):
        for name, method in vars(kind).items():
            counts = callable(method) and not name.startswith("__") and "state_dict" not in name
            if counts and (name in vars(model) or getattr(type(model), name) is not getattr(known, name)):
                return f"{name} of {known.__name__} is overridden"
    return ""


def _hooked(modules: Iterable[tuple[str, torch.nn.Module]]) -> str:
    names = (name for name, module in modules if has_other_hooks(module))
    return next((f"{name} has hooks, which do not run in replays" for name in names), "")


@dataclass(frozen=True)
class CaptureScope:
    """The part of the model in each graph of a pipeline stage, and why not more is captured.

    Attributes:
        holds: The captured part; None if nothing is captured.
        not_model: Why the whole model is not captured; empty if it is.
        why_nothing: Why nothing is captured; empty if something is.
    """

    holds: Holds | None
    not_model: str = ""
    why_nothing: str = ""


def largest_scope(stage: Stage, not_model: str) -> CaptureScope:
    """Return the scope of the largest graphs of ``stage``; ``not_model`` is a reason not to capture the whole model."""
    if layers_per_graph(stage.config) == 1:
        not_model = f"{LAYERS_FLAG} is 1"
    if not not_model:
        return CaptureScope(Holds.MODEL)
    if Options(stage.config).recomputes_layers:
        return CaptureScope(None, not_model, f"layers are recomputed in their backward pass, and {not_model}")
    return CaptureScope(Holds.LAYER, not_model)


class CaptureState:
    """Chooses the parts of a pipeline stage to capture, captures them, and owns the graphs.

    Args:
        status: The initial status.
        not_model: Why the whole model must not be captured by default; empty if it may be.

    Attributes:
        calls: Observes training calls until the first capture.
        scope: The captured part of the model; empty before ``select_scope``.
        status: Whether graphs exist.
        models: The graphs of each chunk of the model; empty if the model was not captured as a whole.
        microbatches: The required number of micro-batches per step; None for any number.
    """

    def __init__(self, stage: Stage, calls: TrainingCalls, status: Status = Status.BEFORE_CAPTURE, not_model: str = ""):
        self._stage, self.calls, self.not_model = stage, calls, not_model
        self.scope = CaptureScope(None)
        self.status = status
        self.models: Sequence[ModelGraphs] = ()
        self.microbatches: int | None = None
        self._rng_states: GraphStates | None = None
        self._rng_hooks: Sequence[Any] = ()

    def has_graphs_of_others(self) -> bool:
        """Return whether another helper has captured part of the stage. Call this before this helper captures."""
        forwards = (getattr(chunk.model, "forward", None) for chunk in self._stage.chunks)
        whole = any(isinstance(forward, ModelGraphs) for forward in forwards)
        return whole or any(layer.cuda_graphs for layer in self._stage.layers)

    def select_scope(self, agreement: CaptureAgreement) -> None:
        """Set ``scope``, which is the same on all ranks, and log the reasons against larger graphs.

        All pipeline stages use the same scope so that they also fall back together if a capture fails on one stage.

        Raises:
            CallOrderError: A model is in evaluation mode.
        """
        stage = self._stage
        if any(chunk.model is not None and not chunk.model.training for chunk in stage.chunks):
            raise CallOrderError("the model is in evaluation mode: call model.train(), then create_cudagraphs()")
        self.calls.stop()
        agreed = agreement.blockers({"interleaved": self._interleaved(), "model": self._blocker()})
        if reason := agreed["interleaved"]:
            scope = CaptureScope(None, why_nothing=reason)
        else:
            scope = largest_scope(stage, agreed["model"])
        self.scope = scope
        if scope.not_model and scope.holds:
            level = logging.WARNING if layers_per_graph(stage.config) == WHOLE_MODEL else logging.INFO
            stage.log(level, f"Layers are captured instead of the whole model, because {scope.not_model}")
        if reason := scope.why_nothing:
            stage.log(logging.WARNING, f"no CUDA graphs are captured, and training continues eagerly, because {reason}")

    def capture(self, agreement: CaptureAgreement, shape: tuple[int, int], input_data: Callable[[], InputData]) -> None:
        """Capture the graphs selected by ``scope``. If the capture fails, ``delete`` undoes it completely.

        Args:
            agreement: Stores the name of the current pass for error messages.
            shape: Sequence length before any sharding, and micro-batch size.
            input_data: Returns inputs and arguments of ``make_graphed_callables`` for individually captured layers.
        """
        for chunk in self._stage.chunks:
            if chunk.fsdp is not None and self._stage.role.language:
                chunk.fsdp.zero_grad_buffer()  # frees the optimizer's gradients
        release_cached_memory()
        if self.scope.holds is Holds.MODEL:
            self._capture_model(agreement, shape)
        else:
            self._capture_layers(agreement, *input_data())
        self._follow_rng_tracker()
        self.status = Status.CAPTURED

    def _capture_model(self, agreement: CaptureAgreement, shape: tuple[int, int]) -> None:
        """Capture each chunk of the model as a whole."""
        from megatron.core.transformer.cuda_graphs import _set_capture_end, _set_capture_start  # imports this module

        stage, chunks = self._stage, self._stage.chunks
        models = [chunk.model for chunk in chunks]
        names = ["the whole model"] if stage.one_graph_serves_all else [f"chunk {i}" for i in range(len(chunks))]
        order = pass_order(stage, [1] * len(models))
        warmup_iters = num_warmup_iterations(stage.config, order.num_microbatches)
        owners = [
            chunk.fsdp.graphs.recorded_passes(partial(agreement.begin, name), alone=len(chunks) == 1)
            for chunk, name in zip(chunks, names, strict=True)
        ]
        quantized = [recorded_quantization(stage, model) for model in models]
        # A failed capture may not restore generators and buffers. Capture mode would disable the layers' hooks.
        outside = between(_set_capture_end, _set_capture_start)
        with outside, preserve_rng(), preserve_buffers([chunk.module for chunk in chunks]):
            self.models = capture_models(
                models,
                owners,
                order.plan,
                shape,
                warmup_iters,
                quantized,
                given=self.calls.given,
            )
        # The first evaluation is captured when it begins.
        for chunk, graphs in zip(chunks, self.models, strict=True):
            chunk.fsdp.graphs.before_evaluation = partial(capture_for_evaluation, stage, chunk, graphs)
        self._warn_of_hooks((model, named(model)) for model in models)

    def _warn_of_hooks(self, captured: Iterable[tuple[torch.nn.Module, dict[torch.nn.Module, str]]]) -> None:
        """Warn about third-party hooks in graphs, given each captured module and the names of its submodules.

        Hooks of the captured modules themselves run around replays.
        """
        hooked = (
            name
            for root, modules in captured
            for module, name in modules.items()
            if module is not root and has_own_hooks(module)
        )
        if names := ", ".join(hooked):
            self._stage.log(
                logging.WARNING,
                f"hooks of {names} are part of CUDA graphs: replays repeat their work on the GPU but do not call them. "
                "Hooks registered after the capture are called, as their layers then run eagerly",
            )

    def _capture_layers(
        self, agreement: CaptureAgreement, sample_args: list[tuple[torch.Tensor, ...]], arguments: dict[str, Any]
    ) -> None:
        """Capture each layer individually."""
        stage = self._stage
        layers = tuple(stage.layers)
        names = [layer_name(layer, index) for index, layer in enumerate(layers)]
        for layer, name in zip(layers, names, strict=True):
            refuse_skipped_forward(layer, name)
        plan = PassOrder(arguments["_order"], arguments["_num_layers_per_chunk"]).plan
        # Same as in the decoder under sequence parallelism.
        rng = get_cuda_rng_tracker().fork() if stage.config.sequence_parallel else nullcontext()
        owners: list[Any] = []  # of the layers' gradients, under Megatron-FSDP
        with preserve_rng(), preserve_buffers(layers), ExitStack() as stack:
            for chunk in stage.chunks:
                if chunk.fsdp is not None:
                    whole = not stage.config.cuda_graph_modules
                    owners += stack.enter_context(chunk.fsdp.graphs.layer_capture(chunk.layers, whole))
            with refuse_changed_attributes(layers), extracted_hooks(layers) as hooks, rng:
                arguments["capture_time_hooks"] = [
                    agreement.naming(own, name) for own, name in zip(hooks, names, strict=True)
                ]
                arguments["owners"] = owners or None
                graphs = make_graphed_callables(layers, sample_args, **arguments)
            held = [
                named(layer, name, layer._get_submodules_under_cudagraphs())
                for layer, name in zip(layers, names, strict=True)
            ]
            snapshots = [
                Snapshot(
                    "change it back, or capture again with delete_cuda_graphs() and create_cudagraphs()",
                    *module_aspects(modules, around=layer),
                )
                for layer, modules in zip(layers, held, strict=True)
            ]
        self._warn_of_hooks(zip(layers, held, strict=True))
        samples = list(zip(sample_args, arguments["sample_kwargs"], strict=True))
        attach_graphs(stage, plan, graphs, samples, snapshots)

    def captures_layers_instead(self) -> bool:
        """Return whether the whole model was chosen by default, so that layers are captured if its capture fails."""
        return self.scope.holds is Holds.MODEL and layers_per_graph(self._stage.config) is None

    def _interleaved(self) -> str:
        if not (self._stage.one_graph_serves_all and self.calls.interleaved):
            return ""
        return (
            "training ran two forward passes before their backward passes, and a graph serves one forward pass at a "
            "time: run each backward pass before the next forward pass"
        )

    def _blocker(self) -> str:
        reason = blocker(self._stage)
        if reason or layers_per_graph(self._stage.config) is not None:
            return reason
        if self.not_model:
            return self.not_model
        for method in filter(None, (other_method(chunk.model) for chunk in self._stage.chunks)):
            return f"{method}, and may compute a different result in every step"
        return self.calls.blocker

    def _follow_rng_tracker(self) -> None:
        """Register hooks that call ``GraphStates.adopt`` before each forward pass of a model."""
        self._rng_states = states = GraphStates()
        models = [chunk.model for chunk in self._stage.chunks if chunk.layers and chunk.model is not None]
        self._rng_hooks = [model.register_forward_pre_hook(lambda *call: states.adopt()) for model in models]

    def adopt_rng_states(self) -> None:
        """Call ``GraphStates.adopt``, for schedules that call layers and thus skip the models' hooks."""
        if self._rng_states is not None:
            self._rng_states.adopt()

    def delete(self) -> None:
        """Free all graphs, if any. No other method may be called afterwards."""
        for hook in self._rng_hooks:
            hook.remove()
        for graphs in self.models:
            graphs.reset()
        detach_graphs(self._stage.chunks)
