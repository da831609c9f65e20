"""List the graphs that a ``TECudaGraphHelper`` would capture, and the parts of the model that they contain."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer._cuda_graphs.engine.plan import Plan
from megatron.core.transformer._cuda_graphs.flags.options import LAYERS_FLAG, WHOLE_MODEL, Options, layers_per_graph
from megatron.core.transformer._cuda_graphs.te.capture_arguments import CaptureArguments
from megatron.core.transformer._cuda_graphs.te.capture_state import CaptureScope, Holds, blocker, largest_scope
from megatron.core.transformer._cuda_graphs.te.layers import _modules_of, decoder_layers
from megatron.core.transformer._cuda_graphs.te.model import inputs_of_slots
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

# Keys: values of --cuda-graph-modules.
_NAMES = {
    "attn": "attention, with the norm before it",
    "mlp": "MLP of dense layers, with the norm before it",
    "moe_router": "router, with the norm before it",
    "moe_preprocess": "preparation of the dispatch to experts",
    "moe": "experts, with the exchange of tokens",
    "mamba": "Mamba mixer, with the norm before it",
}


@dataclass(frozen=True)
class Planned:
    """The graphs of one pipeline stage.

    Attributes:
        graphs: A description of each graph, in the order of capture.
        order: Passes over model chunks; see ``te.order``.
        static_inputs: Static inputs of the graphs; may contain duplicates.
        why_nothing: Reason why nothing is captured; empty if something is.
    """

    graphs: Sequence[str] = ()
    order: Sequence[float] = ()
    static_inputs: Any = ()
    why_nothing: str = ""


def scope_of(helper: TECudaGraphHelper, elsewhere: str) -> CaptureScope:
    """Choose between graphs of the model, the decoder and layers, as a run of ``pretrain_gpt.py`` would.

    Args:
        helper: ``TECudaGraphHelper`` of one pipeline stage.
        elsewhere: Reason why another stage cannot be captured as a whole; empty if all can.
    """
    config = helper.config
    uncalled = layers_per_graph(config) is None and not config.cuda_graph_warmup_steps
    not_model = elsewhere or (f"no step runs before capture: add {LAYERS_FLAG} {WHOLE_MODEL}" if uncalled else "")

    def ruled_out(holds: Holds) -> str:
        return (not_model if holds is Holds.MODEL else "") or blocker(helper.stage, holds)

    return largest_scope(helper.stage, ruled_out)


def planned(helper: TECudaGraphHelper, scope: CaptureScope, masked: bool) -> Planned:
    """Return the graphs that ``helper`` would capture with ``scope``; ``masked`` if training passes attention masks."""
    if reason := _why_nothing(helper, scope):
        return Planned(why_nothing=reason)
    stage, shape = helper.stage, (helper.seq_length, helper.micro_batch_size)
    if scope.holds is Holds.MODEL:
        models = [chunk.model for chunk in stage.chunks]
        passes = CaptureArguments(stage, [[model] for model in models], *shape).order()
        names = [f"chunk {number} as a whole" for number in range(1, len(models) + 1)]
        graphs = _graphs(passes.plan, ["the whole model"] if stage.one_graph_serves_all else names)
        return Planned(graphs, passes.order, inputs_of_slots(models, passes.plan, *shape, masked))
    together = decoder_layers(stage.chunks[0].model) if scope.holds is Holds.DECODER else []
    apart = [[layer for layer in chunk.layers if layer not in together] for chunk in stage.chunks]
    result = Planned(order=(1, -1))
    if any(apart):
        arguments = CaptureArguments(stage, apart, *shape)
        passes = arguments.order()
        is_mtp = dict(zip(helper.flattened_callables, helper.flattened_callables_is_mtp, strict=True))
        names = [f"{'MTP ' if is_mtp[layer] else ''}layer {layer.layer_number}" for own in apart for layer in own]
        samples = arguments.samples(passes.order, passes.chunk_id_list)
        result = Planned(_graphs(passes.plan, names), passes.order, samples)
    if not together:
        return result
    first, last = together[0].layer_number, together[-1].layer_number
    graphs = [f"forward of layers {first} to {last}", *result.graphs, f"backward of layers {last} to {first}"]
    inputs = CaptureArguments(stage, [together], *shape).of_decoder(masked)[0]
    return Planned(graphs, result.order, (inputs, result.static_inputs))


def parts_of(helper: TECudaGraphHelper, scope: CaptureScope) -> Iterator[str]:
    """Yield a line for each kind of module in execution order, with the reason if graphs exclude it."""
    models = [chunk.model for chunk in helper.stage.chunks if chunk.model is not None]
    decoders = [model.decoder for model in models]

    def outside(name: str, owners: Sequence[Any], *attributes: str) -> Iterator[str]:
        count = sum(getattr(owner, attribute, None) is not None for owner in owners for attribute in attributes)
        if count:
            yield _part(name, count, "" if scope.holds is Holds.MODEL else "outside of layers")

    yield from outside("embedding", models, "embedding")
    yield from _parts_of_layers(helper, scope)
    yield from outside("multi-token prediction outside of its layers", models, "mtp")
    yield from outside("final norm", decoders, "final_layernorm", "final_norm")  # second name: hybrid models
    yield from outside("output layer and losses", models, "output_layer")


def _parts_of_layers(helper: TECudaGraphHelper, scope: CaptureScope) -> Iterator[str]:
    options, nothing = Options(helper.config), _why_nothing(helper, scope)
    every: list[Any] = [layer for chunk in helper.stage.chunks for layer in chunk.every_layer]
    for module, name in _NAMES.items():
        layers = [layer for layer in every if module in [each.name for each in _modules_of(layer)]]
        if not layers:
            continue
        why = nothing or ("" if {*layers} <= {*helper.flattened_callables} else "not all layers can be captured")
        if not options.graphs(module, *(("moe",) if module.startswith("moe_") else ())):
            why = f"--cuda-graph-modules lacks {module}"
        yield _part(name, len(layers), why)
        shared = sum(getattr(getattr(layer, "mlp", None), "shared_experts", None) is not None for layer in layers)
        if module == "moe_router" and shared:
            if not why and helper.config.moe_shared_expert_overlap and not options.graphs("moe"):
                why = "--moe-shared-expert-overlap overlaps them with the dispatch, after the router's graph"
            yield _part("shared experts", shared, why)


def _part(name: str, count: int, why_eager: str) -> str:
    return f"    {'eager' if why_eager else 'graph'}  {name} ({count}){why_eager and f': {why_eager}'}"


def _why_nothing(helper: TECudaGraphHelper, scope: CaptureScope) -> str:
    return scope.why_nothing if helper.flattened_callables else "no layer has a module named in --cuda-graph-modules"


def _graphs(plan: Plan, names: Sequence[str]) -> list[str]:
    return [f"{step.kind.value} of {names[plan.callable_of_slot[step.slot]]}" for step in plan.steps]
