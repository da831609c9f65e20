"""What graphs of a pipeline stage hold: the whole model, all layers of its decoder, or one layer; and the graphs."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ..agreement import CaptureAgreement
from ..engine.memory import PoolMemory
from ..engine.rng import GraphStates
from ..flags.options import LAYERS_FLAG, WHOLE_MODEL, Options, layers_per_graph
from ..hooks import calls_weakly, has_other_hooks
from .attached_graphs import detach_graphs
from .changed_shapes import ChangedShapes
from .layers import _layer_is_graphable, decoder_layers, language_layers, layer_name
from .model import PassGraphs
from .sample_inputs import attention_mask_type
from .stage import Chunk, Layers, Stage
from .torch_fsdp import KeptParameters
from .training_calls import TrainingCalls

# Why steps run eagerly, as scalars are named.
BEFORE_CAPTURE, OTHER_INPUTS = "before-capture", "other-inputs"
NO_LAYERS, CAPTURE_FAILED, CAPTURES_USED_UP = "no-layers", "capture-failed", "captures-used-up"
INTERLEAVED_PASSES, RECOMPUTED_LAYERS = "interleaved-passes", "recomputed-layers"


class Holds(Enum):
    """What one graph holds."""

    MODEL = "the model"
    DECODER = "all layers of its decoder"
    LAYER = "a layer"


def blocker(stage: Stage, holds: Holds) -> str:
    """Say why this rank cannot capture the model, or its decoder, in one graph; empty if it can.

    In a pipeline that is a graph of each chunk and micro-batch.
    """
    for chunk in stage.chunks:
        for rules_out, reason, applies in _TABLE:
            found = applies(stage, chunk) if holds in rules_out else None
            if found:
                return reason.format(found)
    return ""


def _is_larger_than_model(chunk: Chunk) -> str:
    differ = chunk.model is not None and {*chunk.fsdp.parameters()} != {*chunk.model.parameters()}
    return type(chunk.model).__name__ if differ else ""


def _leaves_out_layers(chunk: Chunk, config: Any) -> bool:
    if not {*chunk.every_layer} <= {*chunk.layers}:
        return True
    repeated = {*language_layers(chunk.model)} - {*chunk.every_layer}
    return not all(_layer_is_graphable(layer, config) for layer in repeated)


def known_class(model: Any) -> type | None:
    """Return megatron-core's class that ``model`` has its ``forward`` of, ``GPTModel`` or ``HybridModel``, or None."""
    from megatron.core.models.gpt.gpt_model import GPTModel  # these import cuda_graphs, which imports this module
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    own = None if "forward" in vars(model) else getattr(type(model), "forward", None)
    return next((kind for kind in (GPTModel, HybridModel) if isinstance(model, kind) and own is kind.forward), None)


def other_method(model: Any) -> str:
    """Say which method of its class of megatron-core's ``model`` has another one of; empty if there is none.

    Those that save checkpoints do not count. Another one may read what changes from step to step.
    """
    from megatron.core.models.common.language_module.language_module import LanguageModule

    known: Any = known_class(model)
    for kind in (known, LanguageModule):
        for name, method in vars(kind).items():
            counts = callable(method) and not name.startswith("__") and "state_dict" not in name
            if counts and (name in vars(model) or getattr(type(model), name) is not getattr(known, name)):
                return f"{name} is not {known.__name__}'s own"
    return ""


def _is_other_model(model: Any) -> str:
    return "" if known_class(model) else type(model).__name__


def _is_other_decoder(decoder: Any) -> str:
    from megatron.core.models.hybrid.hybrid_block import HybridStack  # these import cuda_graphs
    from megatron.core.transformer.transformer_block import TransformerBlock

    known = getattr(type(decoder), "forward", None) in (TransformerBlock.forward, HybridStack.forward)
    return "" if known and "forward" not in vars(decoder) else type(decoder).__name__


def _hooked(modules: Iterable[tuple[str, torch.nn.Module]]) -> str:
    return next((name for name, module in modules if has_other_hooks(module)), "")


def _hooked_beside_layers(model: Any) -> str:
    # Hooks inside a layer are recorded with it, as in a graph of its own.
    inside = {child for layer in language_layers(model) for child in layer.modules() if child is not layer}
    return _hooked((name, module) for name, module in model.named_modules() if name and module not in inside)


def _hooked_layer(layers: Iterable[torch.nn.Module]) -> str:
    return _hooked((layer_name(layer, index), layer) for index, layer in enumerate(layers))


BOTH, MODEL, DECODER = (Holds.MODEL, Holds.DECODER), (Holds.MODEL,), (Holds.DECODER,)

# What a row rules out, why, and whether it applies to a chunk of the stage: what this returns stands in the reason's
# place for it. The first row that applies counts, and later ones rely on that.
_TABLE: tuple[tuple[tuple[Holds, ...], str, Callable[[Stage, Chunk], object]], ...] = (
    (DECODER, "several micro-batches are in flight at a time", lambda s, c: not s.one_graph_serves_all),
    (BOTH, "the model is not under Megatron-FSDP", lambda s, c: c.fsdp is None),
    (MODEL, "there are parameters outside of {}", lambda s, c: _is_larger_than_model(c)),
    (MODEL, "{} is no GPTModel or HybridModel with its own forward", lambda s, c: _is_other_model(c.model)),
    (
        DECODER,
        "{} is not an unmodified TransformerBlock or HybridStack",
        lambda s, c: _is_other_decoder(getattr(c.model, "decoder", None)),
    ),
    (
        MODEL,
        "not all of its layers can be captured",
        lambda s, c: not decoder_layers(c.model) or _leaves_out_layers(c, s.config),
    ),
    (
        DECODER,
        "not all of its layers can be captured",
        lambda s, c: len(decoder_layers(c.model)) < 2 or not {*decoder_layers(c.model)} <= {*c.layers},
    ),
    (
        BOTH,
        "its layers have different attention masks",
        lambda s, c: len({*map(attention_mask_type, language_layers(c.model))} - {None}) > 1,
    ),
    (BOTH, "only modules of layers are captured (--cuda-graph-modules)", lambda s, c: s.config.cuda_graph_modules),
    (
        BOTH,
        "there is FP4, or FP8 other than --fp8-recipe delayed or tensorwise",
        lambda s, c: Options(s.config).quantizes_otherwise,
    ),
    (
        DECODER,
        "layers of multi-token prediction are computed again (--recompute-granularity full)",
        lambda s, c: Options(s.config).recomputes_layers and not {*c.layers} <= {*decoder_layers(c.model)},
    ),
    (
        BOTH,
        "activations are offloaded",
        lambda s, c: s.config.fine_grained_activation_offloading or s.config.cpu_offloading,
    ),
    (
        MODEL,
        "TransformerEngine's cross entropy reads values on the host (--cross-entropy-fusion-impl native does not)",
        lambda s, c: s.config.cross_entropy_loss_fusion and s.config.cross_entropy_fusion_impl == "te",
    ),
    (BOTH, "backward keeps autograd's graph", lambda s, c: s.config.cuda_graph_retain_backward_graph),
    (MODEL, "{} has hooks, which do not run in replays", lambda s, c: _hooked_beside_layers(c.model)),
    (DECODER, "{} has hooks, which do not run in replays", lambda s, c: _hooked_layer(decoder_layers(c.model))),
    (MODEL, "{}", lambda s, c: c.fsdp.graphs.whole_model_blocker()),
    (DECODER, "{}", lambda s, c: c.fsdp.graphs.recording_blocker(decoder_layers(c.model))),
)


@dataclass(frozen=True)
class Choice:
    """What graphs of a pipeline stage hold, and why no more.

    Attributes:
        holds: None if nothing is captured.
        not_model: Why not the whole model; empty if it is, or if it is not to be.
        not_decoder: Why not all layers of the decoder; empty if these or the whole model are.
        why_nothing: Why nothing is captured; empty if something is.
        eager_because: The same as scalars name it.
    """

    holds: Holds | None
    not_model: str = ""
    not_decoder: str = ""
    why_nothing: str = ""
    eager_because: str = ""


def choose(stage: Stage, ruled_out: Callable[[Holds], str]) -> Choice:
    """Choose the largest graphs of ``stage`` that --cuda-graph-layers-per-graph allows and nothing rules out.

    Args:
        ruled_out: Says why a graph cannot hold this; empty if it can. It is asked about the larger first.
    """
    wanted, not_model = layers_per_graph(stage.config), ""
    if wanted in (None, WHOLE_MODEL):
        not_model = ruled_out(Holds.MODEL)
        if not not_model:
            return Choice(Holds.MODEL)
    not_decoder = f"{LAYERS_FLAG} is 1" if wanted == 1 else ruled_out(Holds.DECODER)
    if not not_decoder:
        return Choice(Holds.DECODER, not_model)
    if not Options(stage.config).recomputes_layers:
        return Choice(Holds.LAYER, not_model, not_decoder)
    why_nothing = f"layers are computed again in their backward pass, and {not_decoder}"
    return Choice(None, not_model, not_decoder, why_nothing, RECOMPUTED_LAYERS)


@dataclass(frozen=True)
class GraphUse:
    """Graph usage counters of this rank, since the helper was made.

    Attributes:
        replays: How often forward graphs of training were replayed.
        captures: How often training was captured.
        pool_bytes: The memory pools of the graphs that there are, those for evaluation included; None where the engine
            does not show them.
    """

    replays: int
    captures: int
    pool_bytes: int | None


class CaptureState:
    """Decides what graphs of a pipeline stage hold, and keeps them, or why there are none.

    One object serves one capture and the graphs it leaves.

    Args:
        calls: Watches training until the first capture.
        eager_because: Why steps run eagerly.
        not_model: Why the whole model is not captured by default; empty if nothing is known against it.

    Attributes:
        choice: What graphs hold; nothing until ``choose``.
        eager_because: The argument; empty once there are graphs.
        whole: The graphs of whole passes: of each chunk of the model, or of the decoder's layers.
        kept: By chunk, the parameters that FSDP2 keeps for the graphs of its layers.
        microbatches: Micro-batches of the steps that the capture was for; None for any number.
        shapes: The passes of other shapes; None where these may not run eagerly.
    """

    def __init__(self, stage: Stage, calls: TrainingCalls, eager_because: str = BEFORE_CAPTURE, not_model: str = ""):
        self._stage, self._calls, self._not_model = stage, calls, not_model
        self.choice = Choice(None)
        self.eager_because = eager_because
        self.whole: Sequence[PassGraphs] = ()
        self.kept: Mapping[torch.nn.Module, KeptParameters] = {}
        self.microbatches: int | None = None
        self.shapes: ChangedShapes | None = None
        self._rng_states: GraphStates | None = None
        self._rng_hooks: Sequence[Any] = ()
        self._eager_passes_seen = 0
        self._pools: tuple[int, int | None] = 0, 0  # the number of graphs and the bytes of their pools

    @property
    def models(self) -> Sequence[Any]:
        """The graphs of the whole model, or of each chunk of it; empty if graphs hold less."""
        return self.whole if self.choice.holds is Holds.MODEL else ()

    @property
    def decoder(self) -> Any:
        """The graphs of all layers of the decoder; None if graphs hold more or less."""
        return next(iter(self.whole), None) if self.choice.holds is Holds.DECODER else None

    @property
    def layers_apart(self) -> list[Layers]:
        """The layers of each chunk that have graphs of their own, or are to have them."""
        together = {*(() if self.decoder is None else self.decoder.module.layers)}
        return [[layer for layer in chunk.layers if layer not in together] for chunk in self._stage.chunks]

    # ---------------------------------------------------------------------------------------------------- decision

    def choose(self, agreement: CaptureAgreement) -> None:
        """Set ``choice``, the same on all ranks, and log why graphs hold no more.

        All pipeline stages hold the same, so that a capture that fails on one is followed by the same on all.
        """
        stage, wanted = self._stage, layers_per_graph(self._stage.config)
        self._calls.stop()
        asked = {Holds.MODEL: wanted in (None, WHOLE_MODEL), Holds.DECODER: wanted != 1}
        own = {holds.name: self._blocker(holds) if asks else "" for holds, asks in asked.items()}
        agreed = agreement.objections({"INTERLEAVED": self._interleaved(), **own})
        if reason := agreed["INTERLEAVED"]:
            choice = Choice(None, why_nothing=reason, eager_because=INTERLEAVED_PASSES)
        else:
            choice = choose(stage, lambda holds: agreed[holds.name])
        self.choice = choice
        if choice.not_model:
            level = logging.INFO if wanted is None else logging.WARNING
            stage.log(level, f"instead of the whole model its layers are captured, because {choice.not_model}")
        if choice.why_nothing:
            why = choice.why_nothing
            stage.log(logging.WARNING, f"no CUDA graphs are captured, and training goes on eagerly, because {why}")
        elif choice.holds is Holds.LAYER and wanted != 1 and choice.not_decoder != choice.not_model:
            stage.log(logging.INFO, f"each layer is captured in a graph of its own, because {choice.not_decoder}")

    def captures_layers_instead(self) -> bool:
        """Whether layers are captured if the whole model, chosen by default, cannot be."""
        return self.choice.holds is Holds.MODEL and layers_per_graph(self._stage.config) is None

    def _interleaved(self) -> str:
        if not (self._stage.one_graph_serves_all and self._calls.interleaved):
            return ""
        return (
            "a backward pass followed a further forward pass in training so far, and a graph serves one forward pass "
            "at a time: run each backward pass before the next forward pass to have graphs"
        )

    def _blocker(self, holds: Holds) -> str:
        reason = blocker(self._stage, holds)
        if reason or layers_per_graph(self._stage.config) is not None:
            return reason
        if holds is not Holds.MODEL:
            return ""
        if self._not_model:
            return self._not_model
        for method in filter(None, (other_method(chunk.model) for chunk in self._stage.chunks)):
            return f"{method}, and may compute something else in every step"
        return self._calls.blocker

    # ------------------------------------------------------------------------------------------------ random numbers

    def follow_rng_tracker(self) -> None:
        """Let graphs draw from what Megatron's RNG tracker has when a model is called: no fork is open then."""
        self._rng_states = GraphStates()
        adopt = calls_weakly(self._rng_states.adopt)
        models = [chunk.model for chunk in self._stage.chunks if chunk.layers and chunk.model is not None]
        self._rng_hooks = [model.register_forward_pre_hook(adopt) for model in models]

    def before_step(self) -> None:
        """Do the same before a step: some schedules call layers, not the model."""
        if self._rng_states is not None:
            self._rng_states.adopt()

    # ----------------------------------------------------------------------------------------------------------- use

    def eager_reason(self) -> str:
        """Say why the step since the last call ran eagerly, in whole or in part; empty if it did not."""
        if self.eager_because or self.shapes is None:
            return self.eager_because
        seen, self._eager_passes_seen = self._eager_passes_seen, self.shapes.passes.total
        return OTHER_INPUTS if seen != self._eager_passes_seen else ""

    def replays(self) -> int:
        """How often forward graphs of training were replayed."""
        return sum(getattr(graphed, "replays", 0) for graphed in self._of_training())

    def pool_bytes(self) -> int | None:
        """The memory pools of all graphs; None where the engine does not show them."""
        graphs = [*self._of_training()]
        graphs += [each.evaluation.passes for each in self.models if each.evaluation is not None]
        if len(graphs) != self._pools[0]:  # a look at the allocator takes long, and pools do not grow after capture
            sizes = [size for _, size in pools_of(graphs)]
            self._pools = len(graphs), sum(sizes) if sizes else None
        return self._pools[1]

    def _of_training(self) -> Iterable[Any]:
        """The engine's callables that are replayed in training."""
        whole = [passes for graphs in self.whole for passes in graphs.slots]
        return whole + [getattr(graph, "graphed", graph) for each in self._stage.layers for graph in each.cuda_graphs]

    # ---------------------------------------------------------------------------------------------------- deletion

    def delete(self) -> None:
        """Free all graphs, as far as there are any; nothing else may be called afterwards."""
        for hook in self._rng_hooks:
            hook.remove()
        for graphs in self.whole:
            graphs.reset()
        for kept in self.kept.values():
            kept.release()
        detach_graphs(self._stage.chunks)


def pools_of(graphs: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the number of graphs and the size in bytes of each memory pool of an engine's callables."""
    of_pool: dict[tuple, list[torch.cuda.CUDAGraph]] = {}
    for graphed in graphs:
        for graph in filter(None, graphs_of(graphed)):
            of_pool.setdefault(tuple(graph.pool()), []).append(graph)
    return [(len(own), PoolMemory.of(own[0]).size()) for own in of_pool.values()]


def graphs_of(graphed: Any) -> list[torch.cuda.CUDAGraph | None]:
    """The forward, backward and weight-gradient graph of an engine's callable, or of whole passes; None without one."""
    names = ("forward_graph", "backward_graph", "weight_gradient_graph")
    return [getattr(graphed, name, None) for name in names]
