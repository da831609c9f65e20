"""What a ``TECudaGraphHelper`` would capture, in which order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer._cuda_graphs.engine.passes import recorded_together
from megatron.core.transformer._cuda_graphs.engine.plan import Pass, Plan, Step, ordered_plan
from megatron.core.transformer._cuda_graphs.te import whole_model
from megatron.core.transformer._cuda_graphs.te.helper import TECudaGraphHelper


@dataclass(frozen=True)
class Graph:
    """One graph.

    Attributes:
        kind: Which passes it holds.
        layers: The numbers of the layers in it, in the order in which they run; empty for the whole model.
        mtp: Whether they are layers of multi-token prediction.
    """

    kind: Pass
    layers: tuple[int, ...]
    mtp: bool = False

    def __str__(self) -> str:
        if not self.layers:
            return f"{self.kind.value} of the whole model"
        noun = "layers" if len(self.layers) > 1 else "layer"
        return f"{self.kind.value} of {'MTP ' if self.mtp else ''}{noun} {spans(self.layers)}"


@dataclass(frozen=True)
class Captured:
    """What is captured.

    Attributes:
        graphs: The graphs in the order in which they are captured.
        order: The order of passes over model chunks; see ``te.order``.
        static_inputs: The tensors that replays copy their inputs to; some occur often.
        against_whole_model: Why the whole model cannot be captured; empty if it can.
        most_in_flight: Layers whose forward pass has run and whose backward pass has not, at most.
    """

    graphs: Sequence[Graph]
    order: Sequence[float]
    static_inputs: Sequence[Any]
    against_whole_model: str
    most_in_flight: int


def captured_by(helper: TECudaGraphHelper) -> Captured:
    """Return what ``helper`` would capture now. Megatron-FSDP then expects a capture."""
    against = helper._against_whole_model()
    layers = helper.flattened_callables
    if not layers:
        return Captured((), (), (), against, 0)
    if helper._captures_whole_model():
        graphs = [Graph(Pass.FORWARD, ()), Graph(Pass.BACKWARD, ())]
        inputs = whole_model.sample_inputs(helper.chunks_with_decoder[0], helper.seq_length, helper.micro_batch_size)
        return Captured(graphs, (1, -1), [inputs], against, len(layers))
    args, kwargs = helper._get_cuda_graph_input_data()
    plan = ordered_plan(kwargs["_order"], kwargs["_num_layers_per_chunk"], len(layers))
    chains = {member: chain for chain in kwargs.get("chains", ()) for member in chain.members}
    recorded = list(recorded_together(plan, chains))
    graphs = [_graph(helper, plan, steps) for steps in recorded]
    # Within a graph the output of a layer is the next one's input.
    first = [steps[0].slot for steps in recorded if steps[0].kind is Pass.FORWARD]
    static = [(args[slot], kwargs["sample_kwargs"][slot]) for slot in first]
    return Captured(graphs, kwargs["_order"], static, against, _most_in_flight(plan))


def spans(numbers: Sequence[int]) -> str:
    """Return layer numbers in words, consecutive ones as a span: ``1 to 4, 6``."""
    text, start = [], 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or abs(numbers[end] - numbers[end - 1]) != 1:
            piece = numbers[start:end]
            text.append(f"{piece[0]} to {piece[-1]}" if len(piece) > 1 else f"{piece[0]}")
            start = end
    return ", ".join(text)


def _graph(helper: TECudaGraphHelper, plan: Plan, steps: Sequence[Step]) -> Graph:
    indices = [plan.callable_of_slot[step.slot] for step in steps]
    numbers = [int(getattr(helper.flattened_callables[index], "layer_number", index + 1)) for index in indices]
    return Graph(steps[0].kind, tuple(numbers), helper.flattened_callables_is_mtp[indices[0]])


def _most_in_flight(plan: Plan) -> int:
    live = most = 0
    for step in plan.steps:
        live += {Pass.FORWARD: 1, Pass.BACKWARD: -1}.get(step.kind, 0)
        most = max(most, live)
    return most
