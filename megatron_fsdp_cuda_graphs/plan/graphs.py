"""List the graphs that a ``TECudaGraphHelper`` would capture."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer._cuda_graphs.engine.plan import Plan
from megatron.core.transformer._cuda_graphs.flags.options import LAYERS_FLAG, WHOLE_MODEL, layers_per_graph
from megatron.core.transformer._cuda_graphs.te.capture_arguments import layer_samples, pass_order
from megatron.core.transformer._cuda_graphs.te.capture_state import CaptureScope, Holds, blocker, largest_scope
from megatron.core.transformer._cuda_graphs.te.model import inputs_of_slots
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper


@dataclass(frozen=True)
class Planned:
    """The graphs of one pipeline stage.

    Attributes:
        graphs: A description of each graph, in the order of capture.
        order: Order of the passes over model chunks; see ``PassOrder``.
        static_inputs: Static inputs of the graphs; may contain duplicates.
        why_nothing: Reason why there are no graphs; empty if there are.
    """

    graphs: Sequence[str] = ()
    order: Sequence[float] = ()
    static_inputs: Any = ()
    why_nothing: str = ""


def scope_of(helper: TECudaGraphHelper, elsewhere: str) -> CaptureScope:
    """Choose between graphs of the model and of layers, as a run of ``pretrain_gpt.py`` would.

    Args:
        helper: ``TECudaGraphHelper`` of one pipeline stage.
        elsewhere: Reason why another stage cannot be captured as a whole; empty if all can.
    """
    config = helper.config
    uncalled = layers_per_graph(config) is None and not config.cuda_graph_warmup_steps
    not_model = elsewhere or (f"no step runs before capture: add {LAYERS_FLAG} {WHOLE_MODEL}" if uncalled else "")
    return largest_scope(helper.stage, not_model or blocker(helper.stage))


def planned(helper: TECudaGraphHelper, scope: CaptureScope, given: Collection[str]) -> Planned:
    """Return the graphs that ``helper`` would capture with ``scope``; ``given`` are optional arguments of calls."""
    unnamed = "" if helper.flattened_callables else "no layer has a module named in --cuda-graph-modules"
    if unnamed or scope.why_nothing:
        return Planned(why_nothing=unnamed or scope.why_nothing)
    stage, shape = helper.stage, (helper.seq_length, helper.micro_batch_size)
    if scope.holds is Holds.MODEL:
        models = [chunk.model for chunk in stage.chunks]
        passes = pass_order(stage, [1] * len(models))
        names = [f"chunk {number} as a whole" for number in range(1, len(models) + 1)]
        graphs = _graphs(passes.plan, ["the whole model"] if stage.one_graph_serves_all else names)
        return Planned(graphs, passes.order, inputs_of_slots(models, passes.plan, *shape, given))
    passes = pass_order(stage, [len(chunk.layers) for chunk in stage.chunks])
    is_mtp = dict(zip(helper.flattened_callables, helper.flattened_callables_is_mtp, strict=True))
    names = [f"{'MTP ' if is_mtp[layer] else ''}layer {layer.layer_number}" for layer in stage.layers]
    return Planned(_graphs(passes.plan, names), passes.order, layer_samples(stage, passes.plan, *shape))


def _graphs(plan: Plan, names: Sequence[str]) -> list[str]:
    return [f"{step.kind.value} of {names[plan.callable_of_slot[step.slot]]}" for step in plan.steps]
