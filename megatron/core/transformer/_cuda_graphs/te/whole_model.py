"""Model chunks whose whole forward pass is one graph, from tokens or hidden states to losses or hidden states.

Their backward pass is another. In a pipeline each micro-batch of a step has graphs of its own.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from megatron.core.num_microbatches_calculator import get_num_microbatches

from ..eager_passes import EagerPasses
from ..engine.captured import GraphedCallable
from ..engine.plan import Plan, unordered_plan
from ..engine.quantization import RecordedQuantization
from ..evaluation_mode import may_replay_evaluation
from ..packed_sequences import OFFSETS, from_static_offsets
from ..snapshot import Snapshot
from .forward_graphs import ForwardGraphs, captured, whole_passes
from .layers import decoder_layers, language_layers
from .order import PassOrder
from .sample_inputs import LayerInputs, captures_attention, sample_arguments
from .training_calls import HIDDEN_STATES, expected_inputs, is_first, is_last, is_training, shape_of, unused_by


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


def sample_inputs(model: Any, seq_length: int, micro_batch_size: int) -> dict[str, torch.Tensor]:
    """Make static inputs of ``model``, by the keywords of its ``forward``, and ``hidden_states`` of another stage.

    Shapes and dtypes are those of ``expected_inputs``, and of the first layer's hidden states. The attention mask is
    the one that layers apply where none is given; there is none without attention.

    Args:
        model: The language model, or a chunk of it.
    """
    of_layers = LayerInputs(model.config, seq_length, micro_batch_size)
    attention = next(filter(captures_attention, language_layers(model)), None)
    _, of_attention = ((), {}) if attention is None else of_layers.make(attention, None)
    expected = expected_inputs(model, micro_batch_size, seq_length // model.config.context_parallel_size)
    expected.pop("attention_mask", None)
    inputs = {name: torch.zeros(shape, dtype=dtype, device="cuda") for name, (shape, dtype) in expected.items()}
    if "loss_mask" in inputs:
        inputs["loss_mask"].fill_(1)
    if not is_first(model):
        (hidden_states,), _ = of_layers.make(decoder_layers(model)[0], None)
        inputs[HIDDEN_STATES] = hidden_states
    return inputs | of_attention


def inputs_of_slots(
    models: Sequence[Any], plan: Plan, seq_length: int, micro_batch_size: int
) -> list[dict[str, torch.Tensor]]:
    """Return the static inputs of each slot of ``plan``, whose callables are ``models``.

    Slots of a model share them once nothing reads them any more. The other arguments are those of ``sample_inputs``.
    """
    samples = sample_arguments(
        plan,
        lambda index: ((), sample_inputs(models[index], seq_length, micro_batch_size)),
        lambda index: index,  # of two models one may be given a mask and the other none
    )
    return [inputs for _, inputs in samples]


class ModelGraphs(ForwardGraphs):
    """Stands for the ``forward`` of a language model, or of a chunk of it, and replays its graphs where they fit.

    They fit calls for training that give labels (where there are losses), tensors as at capture and nothing else, as
    long as the modules are what they were, and steps have as many micro-batches. So do those of ``evaluation`` calls in
    evaluation, once there are any. The model runs eagerly in any other call.

    Args:
        kept, stands: As of ``ForwardGraphs``.

    Attributes:
        evaluation: The graph of the forward pass in evaluation; None without one.
    """

    evaluation: "ModelGraphs | None" = None

    def __init__(
        self,
        model: Any,
        slots: Sequence[GraphedCallable],
        eager_passes: EagerPasses,
        snapshot: Snapshot,
        kept: Sequence[Any] = (),
        stands: bool = True,
    ):
        unused = unused_by(model)
        if {"attention_mask", *OFFSETS}.isdisjoint(slots[0].kwargs):  # there is no attention
            unused.add("attention_mask")
        super().__init__(model, slots, eager_passes, snapshot, unused=unused, kept=kept, stands=stands)

    def reset(self) -> None:
        if self.evaluation is not None:
            self.evaluation.reset()
            self.evaluation = None
        super().reset()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, by a replay if possible."""
        graphs: ModelGraphs | None = None
        if is_training(self.module):
            graphs = self
        elif self.evaluation is not None and not self.module.training and _may_replay_evaluation():
            graphs = self.evaluation
        output = None if graphs is None else graphs.replay(args, kwargs)
        if output is not None:
            return output
        if graphs is not None or torch.is_grad_enabled():
            (graphs or self).before_eager_forward()
        return type(self.module).forward(self.module, *args, **kwargs)

    def replay(self, args: tuple, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the output of a call by a replay; None if the graphs do not fit it."""
        given = self.by_name(args, kwargs)
        if HIDDEN_STATES in self.passes.kwargs:
            given[HIDDEN_STATES] = self.module.decoder.input_tensor
        passes = None if shape_of(self.module, given) is None else self._slot()
        inputs = None if passes is None else self.inputs_of(given, passes)
        return None if passes is None or inputs is None else passes.replay(inputs)

    def _slot(self) -> GraphedCallable | None:
        """Return the graphs of the micro-batch; None in a step of another number of them, whose order is another.

        Those of evaluation serve each: no backward pass reads what one has left.
        """
        if not self.module.training or (is_first(self.module) and is_last(self.module)):
            return self.slots[0]
        number = getattr(decoder_layers(self.module)[0], "current_microbatch", None)
        if number is None or number >= len(self.slots) or get_num_microbatches() != len(self.slots):
            micro_batches = f"{len(self.slots)} micro-batches that a pipeline schedule runs"
            self._note_eager_pass(f"it was captured for steps of {micro_batches}")
            return None
        return self.slots[number]

    def shape_of(self, given: Mapping[str, Any]) -> tuple[int, int]:
        shape = shape_of(self.module, given)
        assert shape is not None
        return shape[::-1]


def _may_replay_evaluation() -> bool:
    """Whether the current modes allow it. A backward pass that calls the model may be using what a replay releases."""
    return may_replay_evaluation() and torch._C._current_graph_task_id() == -1


def capture_whole_models(
    models: Sequence[Any],
    owners: Sequence[Any],
    order: PassOrder,
    seq_length: int,
    micro_batch_size: int,
    num_warmup_iters: int,
    eager_passes: EagerPasses,
    quantized: Sequence[RecordedQuantization | None],
) -> list[ModelGraphs]:
    """Capture the passes of ``models``, whose calls replay them from then on; see ``captured``.

    Args:
        models: The language model, or the chunks of it in a pipeline stage.
        order: The order of their passes, each of them being a chunk of one layer.
        eager_passes: Counts calls for training with tensors of another shape.
        quantized: How each model is quantized; None if it is not.
    """
    plan = order.plan
    samples = inputs_of_slots(models, plan, seq_length, micro_batch_size)
    slots: defaultdict[Any, list[GraphedCallable]] = defaultdict(list)
    forward = [partial(_forward, model, seq_length) for model in models]
    for index, inputs in zip(plan.callable_of_slot, samples, strict=True):
        own = slots[models[index]]
        name = type(models[index]).__name__
        if order.num_microbatches > 1:
            name += f" (chunk {index}, micro-batch {len(own)})"
        own.append(whole_passes(name, forward[index], inputs, models[index], owners[index], quantized[index]))
    kept: list[Any] = []
    with captured(slots, owners, plan, num_warmup_iters, _around_passes(models, kept)) as snapshots:
        return [ModelGraphs(model, slots[model], eager_passes, snapshots[model], kept) for model in models]


def capture_evaluation(
    model: Any,
    owner: Any,
    seq_length: int,
    micro_batch_size: int,
    num_warmup_iters: int,
    quantized: RecordedQuantization | None,
) -> ModelGraphs:
    """Capture the forward pass of ``model``, which is in evaluation mode, without grad; see ``captured``.

    Args:
        model: The language model, whose training has graphs.
        quantized: How the model is quantized; None if it is not. Not that of its training.
    """
    inputs = sample_inputs(model, seq_length, micro_batch_size)
    name = f"{type(model).__name__} in evaluation"
    passes = whole_passes(name, partial(_forward, model, seq_length), inputs, model, owner, quantized)
    plan, kept = unordered_plan(1), list[Any]()
    around = _around_passes([model], kept)
    with captured({model: [passes]}, [owner], plan, num_warmup_iters, around, training=False) as snapshots:
        return ModelGraphs(model, [passes], EagerPasses(), snapshots[model], kept, stands=False)


@contextmanager
def _around_passes(models: Iterable[Any], kept: list[Any]) -> Iterator[None]:
    """The context in which ``models`` are captured; rotary embeddings, which may leave their cache, go to ``kept``.

    At its end the inputs of chunks are those of the call in which evaluation captures.
    """
    # Imports TransformerEngine's wrappers, which import cuda_graphs, which imports this module.
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    with ExitStack() as stack:
        for model in models:
            for module in model.modules():
                if isinstance(module, RotaryEmbedding):
                    stack.callback(module.register_forward_hook(lambda *call: kept.append(call[-1])).remove)
            if not is_first(model):
                stack.callback(model.set_input_tensor, model.decoder.input_tensor)
        yield


def _forward(
    model: Any, seq_length: int, hidden_states: torch.Tensor | None = None, **given: torch.Tensor
) -> torch.Tensor:
    if hidden_states is not None:
        model.set_input_tensor(hidden_states)
    absent = dict.fromkeys(("input_ids", "position_ids", "attention_mask"))
    return type(model).forward(model, **(absent | from_static_offsets(given, seq_length)))
