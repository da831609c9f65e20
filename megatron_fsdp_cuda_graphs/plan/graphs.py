"""The graphs that a ``TECudaGraphHelper`` would capture, and which parts of the model run in them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megatron.core.transformer._cuda_graphs.engine.plan import Pass, Plan
from megatron.core.transformer._cuda_graphs.flags.options import Options, layers_per_graph
from megatron.core.transformer._cuda_graphs.te.capture_arguments import CaptureArguments
from megatron.core.transformer._cuda_graphs.te.capture_state import Choice, Holds, blocker, choose
from megatron.core.transformer._cuda_graphs.te.layers import _modules_of, decoder_layers
from megatron.core.transformer._cuda_graphs.te.model import inputs_of_slots
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

# By the value of --cuda-graph-modules that selects them.
_NAMES = {
    "attn": "attention, with the norm before it",
    "mlp": "MLP of dense layers, with the norm before it",
    "moe_router": "router, with the norm before it",
    "moe_preprocess": "preparation of the dispatch to experts",
    "moe": "experts, with the exchange of tokens",
    "mamba": "Mamba mixer, with the norm before it",
}
_OUTSIDE = "outside of layers, and graphs hold layers"
_WHOLE = "in the graphs of the whole model"
_REPEATED = "it runs several times for a micro-batch, and would overwrite its activations"


@dataclass(frozen=True)
class Planned:
    """The graphs of one pipeline stage.

    Attributes:
        graphs: A description of each graph, in the order of capture.
        order: The order of passes over model chunks; see ``te.order``.
        static_inputs: The tensors that replays copy their inputs to; some occur several times.
        most_in_flight: The largest number of layers between their forward and their backward pass.
        why_nothing: Why nothing is captured; empty if something is.
    """

    graphs: Sequence[str] = ()
    order: Sequence[float] = ()
    static_inputs: Any = ()
    most_in_flight: int = 0
    why_nothing: str = ""


@dataclass(frozen=True)
class Part:
    """One kind of module in a pipeline stage.

    Attributes:
        module: The value of ``--cuda-graph-modules`` that selects it; None for modules outside of layers.
    """

    name: str
    count: int
    graphed: bool
    why: str
    module: str | None = None


def choice_of(helper: TECudaGraphHelper, elsewhere: str) -> Choice:
    """Return what the graphs of ``helper`` would hold in a training by ``pretrain_gpt.py``.

    Args:
        helper: The helper of one pipeline stage.
        elsewhere: Why another stage cannot be captured as a whole; empty if it can.
    """
    config = helper.config
    uncalled = layers_per_graph(config) is None and not config.cuda_graph_warmup_steps
    not_model = elsewhere or ("no step calls the model before capture" if uncalled else "")

    def ruled_out(holds: Holds) -> str:
        return (not_model if holds is Holds.MODEL else "") or blocker(helper.stage, holds)

    return choose(helper.stage, ruled_out)


def planned(helper: TECudaGraphHelper, choice: Choice) -> Planned:
    """Return the graphs that ``helper`` would capture, given its ``choice``."""
    if reason := _why_nothing(helper, choice):
        return Planned(why_nothing=reason)
    stage, shape = helper.stage, (helper.seq_length, helper.micro_batch_size)
    if choice.holds is Holds.MODEL:
        models = [chunk.model for chunk in stage.chunks]
        passes = CaptureArguments(stage, [[model] for model in models], *shape).order()
        names = [f"chunk {number} as a whole" for number in range(1, len(models) + 1)]
        graphs = _graphs(passes.plan, ["the whole model"] if stage.one_graph_serves_all else names)
        in_flight = _most_in_flight(passes.plan, [len(chunk.layers) for chunk in stage.chunks])
        return Planned(graphs, passes.order, inputs_of_slots(models, passes.plan, *shape), in_flight)
    together = decoder_layers(stage.chunks[0].model) if choice.holds is Holds.DECODER else []
    apart = [[layer for layer in chunk.layers if layer not in together] for chunk in stage.chunks]
    result = Planned(order=(1, -1))
    if any(apart):
        arguments = CaptureArguments(stage, apart, *shape)
        passes = arguments.order()
        is_mtp = dict(zip(helper.flattened_callables, helper.flattened_callables_is_mtp, strict=True))
        names = [f"{'MTP ' if is_mtp[layer] else ''}layer {layer.layer_number}" for own in apart for layer in own]
        samples = arguments.samples(passes.order, passes.chunk_id_list)
        in_flight = _most_in_flight(passes.plan, [1] * len(names))
        result = Planned(_graphs(passes.plan, names), passes.order, samples, in_flight)
    if not together:
        return result
    first, last = together[0].layer_number, together[-1].layer_number
    graphs = [f"forward of layers {first} to {last}", *result.graphs, f"backward of layers {last} to {first}"]
    inputs = CaptureArguments(stage, [together], *shape).of_decoder()[0]
    in_flight = result.most_in_flight + len(together)
    return Planned(graphs, result.order, (inputs, result.static_inputs), in_flight)


def parts_of(helper: TECudaGraphHelper, choice: Choice) -> Iterator[Part]:
    """Yield the parts of the stage of ``helper`` in the order in which they run, given its ``choice``."""
    config, whole = helper.config, choice.holds is Holds.MODEL
    models = [chunk.model for chunk in helper.stage.chunks if chunk.model is not None]

    def outside(name: str, owners: Sequence[Any], *attributes: str, why: str = _OUTSIDE) -> Iterator[Part]:
        count = sum(getattr(owner, attribute, None) is not None for owner in owners for attribute in attributes)
        if count:
            yield Part(name, count, whole, _WHOLE if whole else why)

    yield from outside("embedding", models, "embedding")
    yield from _parts_of_layers(helper, choice)
    if config.mtp_use_repeated_layer and config.mtp_num_layers > 1:
        yield from outside("repeated layer of multi-token prediction", models, "mtp", why=_REPEATED)
    yield from outside("multi-token prediction outside of its layers", models, "mtp")
    decoders = [model.decoder for model in models]
    yield from outside("final norm", decoders, "final_layernorm", "final_norm")  # the latter in hybrid models
    yield from outside("output layer and losses", models, "output_layer")


def _parts_of_layers(helper: TECudaGraphHelper, choice: Choice) -> Iterator[Part]:
    options, whole = Options(helper.config), choice.holds is Holds.MODEL
    every: list[Any] = [layer for chunk in helper.stage.chunks for layer in chunk.every_layer]
    reason = _why_nothing(helper, choice)
    graphable = set() if reason else {*helper.flattened_callables}
    selected = f"--cuda-graph-modules is {' '.join(sorted(options.modules))}"
    for module, name in _NAMES.items():
        layers = [layer for layer in every if module in [each.name for each in _modules_of(layer)]]
        if not layers:
            continue
        chosen = options.graphs(module, *(("moe",) if module.startswith("moe_") else ()))
        graphed = chosen and graphable.issuperset(layers)
        if not chosen:
            why = f"{selected}, without {module}"
        elif not graphed:
            why = reason or "not all of these layers can be captured"
        elif options.modules:
            why = f"--cuda-graph-modules has {module if module in options.modules else 'moe'}"
        else:
            why = _WHOLE if whole else "whole layers are captured"
        yield Part(name, len(layers), graphed, why, module)
        shared = sum(getattr(getattr(layer, "mlp", None), "shared_experts", None) is not None for layer in layers)
        if module != "moe_router" or not shared:
            continue
        if options.graphs("moe"):
            graphed, why, module = True, _WHOLE if whole else "with the experts", "moe"
        elif not options.graphs("moe_router"):
            graphed, why = False, f"{selected}, without moe_router"
        elif helper.config.moe_shared_expert_overlap:
            why = "--moe-shared-expert-overlap lets them run beside the dispatch, after the router's graph"
            graphed, module = False, "moe"
        else:
            graphed, why = True, "with the router"
        yield Part("shared experts", shared, graphed, why, module)


def _why_nothing(helper: TECudaGraphHelper, choice: Choice) -> str:
    return choice.why_nothing if helper.flattened_callables else "no layer has a part that --cuda-graph-modules names"


def _graphs(plan: Plan, names: Sequence[str]) -> list[str]:
    return [f"{step.kind.value} of {names[plan.callable_of_slot[step.slot]]}" for step in plan.steps]


def _most_in_flight(plan: Plan, layers: Sequence[int]) -> int:
    """Return ``Planned.most_in_flight``, given the number of layers of each callable."""
    sign = {Pass.FORWARD: 1, Pass.BACKWARD: -1}
    return max(accumulate(sign.get(step.kind, 0) * layers[plan.callable_of_slot[step.slot]] for step in plan.steps))
