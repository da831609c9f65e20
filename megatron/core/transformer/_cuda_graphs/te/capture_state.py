"""Select and own the graphs of a pipeline stage: of the whole model, of all decoder layers, or of each layer."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ..agreement import CaptureAgreement
from ..engine.rng import GraphStates
from ..errors import CallOrderError
from ..flags.options import LAYERS_FLAG, WHOLE_MODEL, Options, layers_per_graph
from ..hooks import calls_weakly, has_other_hooks
from .attached_graphs import detach_graphs
from .layers import decoder_layers, has_forward_of, language_layers, layer_name, why_not_graphable
from .model import PassGraphs
from .sample_inputs import attention_mask_type
from .stage import Chunk, Layers, Stage
from .training_calls import TrainingCalls


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
    DECODER = "all layers of its decoder"
    LAYER = "a layer"


def blocker(stage: Stage, holds: Holds) -> str:
    """Return why this rank cannot capture the model, or its decoder, in one graph; empty if it can.

    In a pipeline, each chunk and micro-batch has its own graph.
    """
    blockers = _model_blockers if holds is Holds.MODEL else _decoder_blockers
    return next((reason for chunk in stage.chunks for reason in blockers(stage, chunk) if reason), "")


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
        yield _NOT_ALL_LAYERS
    yield from _common_blockers(stage, chunk)
    if config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te":
        yield "TransformerEngine's cross entropy reads values on the host: use --cross-entropy-fusion-impl native"
    # Hooks inside a layer are recorded with it, as when the layer is captured individually.
    inside = {child for layer in language_layers(model) for child in layer.modules() if child is not layer}
    yield _hooked((name, module) for name, module in model.named_modules() if name and module not in inside)
    yield chunk.fsdp.graphs.whole_model_blocker()


def _decoder_blockers(stage: Stage, chunk: Chunk) -> Iterator[str]:
    """Yield reasons why the layers of the decoder cannot be captured together; see ``_model_blockers``."""
    layers = decoder_layers(chunk.model)
    if not stage.one_graph_serves_all:
        yield "several micro-batches are in flight at a time"
    if chunk.fsdp is None:
        yield "the model is not under Megatron-FSDP"
    yield _other_decoder(getattr(chunk.model, "decoder", None))
    if len(layers) < 2 or not {*layers} <= {*chunk.layers}:
        yield _NOT_ALL_LAYERS
    yield from _common_blockers(stage, chunk)
    if Options(stage.config).recomputes_layers and not {*chunk.layers} <= {*layers}:
        yield "layers of multi-token prediction are recomputed (--recompute-granularity full)"
    yield _hooked((layer_name(layer, index), layer) for index, layer in enumerate(layers))
    yield chunk.fsdp.graphs.recording_blocker(layers)


_NOT_ALL_LAYERS = "not all layers can be captured"


def _common_blockers(stage: Stage, chunk: Chunk) -> Iterator[str]:
    config = stage.config
    if len({*map(attention_mask_type, language_layers(chunk.model))} - {None}) > 1:
        yield "layers have different attention masks"
    if config.cuda_graph_modules:
        yield "only modules of layers are captured (--cuda-graph-modules)"
    if Options(config).quantizes_otherwise:
        yield "FP4, or an --fp8-recipe other than delayed or tensorwise, is used"
    if config.cuda_graph_retain_backward_graph:
        yield "the backward pass keeps autograd's graph (cuda_graph_retain_backward_graph)"


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


def _other_decoder(decoder: Any) -> str:
    from megatron.core.models.hybrid.hybrid_block import HybridStack  # these import cuda_graphs
    from megatron.core.transformer.transformer_block import TransformerBlock

    if has_forward_of(decoder, TransformerBlock) or has_forward_of(decoder, HybridStack):
        return ""
    return f"{type(decoder).__name__} is not an unmodified TransformerBlock or HybridStack"


def _hooked(modules: Iterable[tuple[str, torch.nn.Module]]) -> str:
    names = (name for name, module in modules if has_other_hooks(module))
    return next((f"{name} has hooks, which do not run in replays" for name in names), "")


@dataclass(frozen=True)
class CaptureScope:
    """The part of the model in each graph of a pipeline stage, and why larger parts are not captured.

    Attributes:
        holds: The captured part; None if nothing is captured.
        not_model: Why the whole model is not captured; empty if it is captured, or was not requested.
        not_decoder: Why the decoder layers are not captured together; empty if they, or the whole model, are.
        why_nothing: Why nothing is captured; empty if something is.
    """

    holds: Holds | None
    not_model: str = ""
    not_decoder: str = ""
    why_nothing: str = ""


def largest_scope(stage: Stage, blocker_of: Callable[[Holds], str]) -> CaptureScope:
    """Return the scope of the largest graphs that ``stage`` and ``--cuda-graph-layers-per-graph`` allow.

    Args:
        blocker_of: Returns why a part cannot be captured in one graph; empty if it can.
    """
    wanted, not_model = layers_per_graph(stage.config), ""
    if wanted in (None, WHOLE_MODEL):
        not_model = blocker_of(Holds.MODEL)
        if not not_model:
            return CaptureScope(Holds.MODEL)
    not_decoder = f"{LAYERS_FLAG} is 1" if wanted == 1 else blocker_of(Holds.DECODER)
    if not not_decoder:
        return CaptureScope(Holds.DECODER, not_model)
    if not Options(stage.config).recomputes_layers:
        return CaptureScope(Holds.LAYER, not_model, not_decoder)
    why_nothing = f"layers are recomputed in their backward pass, and {not_decoder}"
    return CaptureScope(None, not_model, not_decoder, why_nothing)


class CaptureState:
    """Chooses the parts of a pipeline stage to capture, and owns the graphs of one capture.

    Args:
        calls: Observes training calls until the first capture.
        status: The initial status.
        not_model: Why the whole model must not be captured by default; empty if it may be.

    Attributes:
        scope: The captured part of the model; empty before ``select_scope``.
        status: Whether graphs exist.
        whole: The whole-pass graphs: one object per model chunk, or one for the decoder's layers.
        microbatches: The required number of micro-batches per step; None for any number.
    """

    def __init__(self, stage: Stage, calls: TrainingCalls, status: Status = Status.BEFORE_CAPTURE, not_model: str = ""):
        self._stage, self._calls, self.not_model = stage, calls, not_model
        self.scope = CaptureScope(None)
        self.status = status
        self.whole: Sequence[PassGraphs] = ()
        self.microbatches: int | None = None
        self._rng_states: GraphStates | None = None
        self._rng_hooks: Sequence[Any] = ()

    @property
    def models(self) -> Sequence[Any]:
        """The graphs of each chunk of the model; empty if the model was not captured as a whole."""
        return self.whole if self.scope.holds is Holds.MODEL else ()

    @property
    def decoder(self) -> Any:
        """The graphs of all decoder layers together; None if the whole model or single layers were captured."""
        return next(iter(self.whole), None) if self.scope.holds is Holds.DECODER else None

    @property
    def layers_apart(self) -> list[Layers]:
        """The layers of each chunk that are, or will be, captured individually."""
        together = {*(() if self.decoder is None else self.decoder.module.layers)}
        return [[layer for layer in chunk.layers if layer not in together] for chunk in self._stage.chunks]

    @property
    def masked(self) -> bool:
        """Whether whole passes are captured with a mask: calls had one, or a model of unknown class may create one."""
        return self._calls.masked or any(known_class(chunk.model) is None for chunk in self._stage.chunks)

    def has_graphs_of_others(self) -> bool:
        """Return whether another helper has captured part of the stage. Call this before this helper captures."""
        models = [chunk.model for chunk in self._stage.chunks]
        parts = [*models, *(getattr(model, "decoder", None) for model in models)]
        whole = any(isinstance(getattr(part, "forward", None), PassGraphs) for part in parts)
        return whole or any(layer.cuda_graphs for layer in self._stage.layers)

    def select_scope(self, agreement: CaptureAgreement) -> None:
        """Set ``scope``, which is the same on all ranks, and log the reasons against larger graphs.

        All pipeline stages use the same scope so that they also fall back together if a capture fails on one stage.

        Raises:
            CallOrderError: A model is in evaluation mode.
        """
        stage, wanted = self._stage, layers_per_graph(self._stage.config)
        if any(chunk.model is not None and not chunk.model.training for chunk in stage.chunks):
            raise CallOrderError("the model is in evaluation mode: call model.train(), then create_cudagraphs()")
        self._calls.stop()
        candidates = {Holds.MODEL: wanted in (None, WHOLE_MODEL), Holds.DECODER: wanted != 1}
        own = {holds.name: self._blocker(holds) if candidate else "" for holds, candidate in candidates.items()}
        agreed = agreement.blockers({"INTERLEAVED": self._interleaved(), **own})
        if reason := agreed["INTERLEAVED"]:
            scope = CaptureScope(None, why_nothing=reason)
        else:
            scope = largest_scope(stage, lambda holds: agreed[holds.name])
        self.scope = scope
        if scope.not_model:
            level = logging.INFO if wanted is None else logging.WARNING
            stage.log(level, f"Layers are captured instead of the whole model, because {scope.not_model}")
        if reason := scope.why_nothing:
            stage.log(logging.WARNING, f"no CUDA graphs are captured, and training continues eagerly, because {reason}")
        elif scope.holds is Holds.LAYER and wanted != 1 and scope.not_decoder != scope.not_model:
            stage.log(logging.INFO, f"Each layer is captured separately, because {scope.not_decoder}")

    def captures_layers_instead(self) -> bool:
        """Return whether the whole model was chosen by default, so that layers are captured if its capture fails."""
        return self.scope.holds is Holds.MODEL and layers_per_graph(self._stage.config) is None

    def _interleaved(self) -> str:
        if not (self._stage.one_graph_serves_all and self._calls.interleaved):
            return ""
        return (
            "training ran two forward passes before their backward passes, and a graph serves one forward pass at a "
            "time: run each backward pass before the next forward pass"
        )

    def _blocker(self, holds: Holds) -> str:
        reason = blocker(self._stage, holds)
        if reason or layers_per_graph(self._stage.config) is not None or holds is not Holds.MODEL:
            return reason
        if self.not_model:
            return self.not_model
        for method in filter(None, (other_method(chunk.model) for chunk in self._stage.chunks)):
            return f"{method}, and may compute a different result in every step"
        return self._calls.blocker

    def follow_rng_tracker(self) -> None:
        """Register hooks that call ``GraphStates.adopt`` before each forward pass of a model."""
        self._rng_states = GraphStates()
        adopt = calls_weakly(self._rng_states.adopt)
        models = [chunk.model for chunk in self._stage.chunks if chunk.layers and chunk.model is not None]
        self._rng_hooks = [model.register_forward_pre_hook(adopt) for model in models]

    def adopt_rng_states(self) -> None:
        """Call ``GraphStates.adopt``, for schedules that call layers and thus skip the models' hooks."""
        if self._rng_states is not None:
            self._rng_states.adopt()

    def delete(self) -> None:
        """Free all graphs, if any. No other method may be called afterwards."""
        for hook in self._rng_hooks:
            hook.remove()
        for graphs in self.whole:
            graphs.reset()
        detach_graphs(self._stage.chunks)
