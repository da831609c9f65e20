"""What a ``TECudaGraphHelper`` would capture, in which order."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megatron.core.transformer._cuda_graphs.engine.plan import Pass, Plan
from megatron.core.transformer._cuda_graphs.flags.options import layers_per_graph
from megatron.core.transformer._cuda_graphs.te.capture_arguments import CaptureArguments
from megatron.core.transformer._cuda_graphs.te.graph_choice import Choice, Holds, blocker, choose
from megatron.core.transformer._cuda_graphs.te.helper import TECudaGraphHelper
from megatron.core.transformer._cuda_graphs.te.layers import decoder_layers
from megatron.core.transformer._cuda_graphs.te.whole_model import inputs_of_slots


@dataclass(frozen=True)
class Graph:
    """One graph.

    Attributes:
        layers: The numbers of the layers in it, in the order in which they run; empty for the whole model.
        mtp: Whether they are layers of multi-token prediction.
        chunk: The chunk of the whole model, counted from 1; None if it is not divided into pipeline stages.
    """

    kind: Pass
    layers: tuple[int, ...]
    mtp: bool = False
    chunk: int | None = None

    def __str__(self) -> str:
        if not self.layers:
            what = "the whole model" if self.chunk is None else f"chunk {self.chunk} as a whole"
            return f"{self.kind.value} of {what}"
        noun = "layers" if len(self.layers) > 1 else "layer"
        return f"{self.kind.value} of {'MTP ' if self.mtp else ''}{noun} {spans(self.layers)}"


@dataclass(frozen=True)
class Captured:
    """What is captured.

    Attributes:
        graphs: The graphs in the order in which a step replays them.
        order: The order of passes over model chunks; see ``te.order``.
        static_inputs: The tensors that replays copy their inputs to; some occur often.
        most_in_flight: Layers whose forward pass has run and whose backward pass has not, at most.
        why_nothing: Why nothing is captured; empty if something is.
    """

    graphs: Sequence[Graph]
    order: Sequence[float]
    static_inputs: Sequence[Any]
    most_in_flight: int
    why_nothing: str = ""


def choice_of(helper: TECudaGraphHelper, elsewhere: str) -> Choice:
    """Return what graphs of ``helper`` would hold after steps of ``pretrain_gpt.py``, whose calls of a model fit them.

    Args:
        helper: Of one pipeline stage.
        elsewhere: Why another stage cannot be captured as a whole; empty if it can.
    """
    config = helper.config
    uncalled = layers_per_graph(config) is None and not config.cuda_graph_warmup_steps
    not_model = elsewhere or ("no step calls the model before capture" if uncalled else "")

    def ruled_out(holds: Holds) -> str:
        return (not_model if holds is Holds.MODEL else "") or blocker(helper.stage, holds)

    return choose(helper.stage, ruled_out)


def _whole_chunks(helper: TECudaGraphHelper) -> Captured:
    stage, shape = helper.stage, (helper.seq_length, helper.micro_batch_size)
    models = [chunk.model for chunk in stage.chunks]
    order = CaptureArguments(stage, [[model] for model in models if model is not None], *shape).order()
    plan = order.plan
    inputs = inputs_of_slots(models, plan, *shape)
    graphs = [
        Graph(step.kind, (), chunk=None if stage.one_graph_serves_all else plan.callable_of_slot[step.slot] + 1)
        for step in plan.steps
    ]
    return Captured(graphs, order.order, inputs, _most_in_flight(plan, [len(chunk.layers) for chunk in stage.chunks]))


def why_nothing(helper: TECudaGraphHelper, choice: Choice) -> str:
    """Say why ``helper`` would capture nothing, given its ``choice``; empty if it would capture something."""
    return choice.why_nothing if helper.flattened_callables else "no layer has a part that --cuda-graph-modules names"


def captured_by(helper: TECudaGraphHelper, elsewhere: str = "") -> Captured:
    """Return what ``helper`` would capture; see ``choice_of``."""
    layers, choice = helper.flattened_callables, choice_of(helper, elsewhere)
    if reason := why_nothing(helper, choice):
        return Captured((), (), (), 0, reason)
    if choice.holds is Holds.MODEL:
        return _whole_chunks(helper)
    graphs: list[Graph] = []
    static: list[Any] = []
    in_flight, numbers = 0, ()
    together = decoder_layers(helper.chunks_with_decoder[0]) if choice.holds is Holds.DECODER else []
    own = [[layer for layer in chunk.layers if layer not in together] for chunk in helper.stage.chunks]
    apart = [layer for chunk in own for layer in chunk]
    shape = helper.seq_length, helper.micro_batch_size
    if together:
        numbers = tuple(layer.layer_number for layer in together)
        static.append(CaptureArguments(helper.stage, [together], *shape).of_decoder()[0])
        in_flight = len(together)
    order: Sequence[float] = (1, -1)
    if apart:
        arguments = CaptureArguments(helper.stage, own, *shape)
        passes = arguments.order()
        order, plan = passes.order, passes.plan
        is_mtp = dict(zip(layers, helper.flattened_callables_is_mtp, strict=True))
        for step in plan.steps:
            index = plan.callable_of_slot[step.slot]
            number = int(getattr(apart[index], "layer_number", index + 1))
            graphs.append(Graph(step.kind, (number,), is_mtp[apart[index]]))
        static += arguments.samples(order, passes.chunk_id_list)
        in_flight += _most_in_flight(plan, [1] * len(apart))
    if together:
        graphs = [Graph(Pass.FORWARD, numbers), *graphs, Graph(Pass.BACKWARD, numbers[::-1])]
    return Captured(graphs, order, static, in_flight)


def spans(numbers: Sequence[int]) -> str:
    """Return layer numbers in words, consecutive ones as a span: ``1 to 4, 6``."""
    text, start = [], 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or abs(numbers[end] - numbers[end - 1]) != 1:
            piece = numbers[start:end]
            text.append(f"{piece[0]} to {piece[-1]}" if len(piece) > 1 else f"{piece[0]}")
            start = end
    return ", ".join(text)


def _most_in_flight(plan: Plan, layers: Sequence[int]) -> int:
    """Return ``Captured.most_in_flight``, given how many layers each callable has."""
    sign = {Pass.FORWARD: 1, Pass.BACKWARD: -1}
    changes = (sign.get(step.kind, 0) * layers[plan.callable_of_slot[step.slot]] for step in plan.steps)
    return max(accumulate(changes))
