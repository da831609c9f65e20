"""A model chunk whose whole forward pass is one graph, from tokens to losses, and whose backward pass is another."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..attribute_reads import AttributeReads
from ..eager_passes import EagerPasses
from ..engine.quantization import RecordedQuantization
from ..engine.whole_passes import WholePasses
from ..evaluation_mode import may_replay_evaluation
from ..packed_sequences import OFFSETS, from_static_offsets
from ..replay_conditions import ReplayConditions
from .forward_graphs import ForwardGraphs
from .layers import decoder_layers, mtp_layers
from .sample_inputs import LayerInputs, captures_attention
from .training_calls import UNUSED, expected_inputs, is_training


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
    """Make static inputs of ``model``, by the keywords of its ``forward``.

    Shapes and dtypes are those of ``expected_inputs``. The attention mask is the one that layers apply where none is
    given; there is none without attention.

    Args:
        model: The language model.
        seq_length: Tokens in a sequence, before any parallel division.
        micro_batch_size: Sequences in a micro-batch.
    """
    of_layers = LayerInputs(model.config, seq_length, micro_batch_size)
    attention = next(filter(captures_attention, [*decoder_layers(model), *mtp_layers(model)]), None)
    _, of_attention = ((), {}) if attention is None else of_layers.make(attention, None)
    expected = expected_inputs(model, micro_batch_size, seq_length // model.config.context_parallel_size)
    expected.pop("attention_mask", None)
    inputs = {name: torch.zeros(shape, dtype=dtype, device="cuda") for name, (shape, dtype) in expected.items()}
    if "loss_mask" in inputs:
        inputs["loss_mask"].fill_(1)
    return inputs | of_attention


class _OfModel(ForwardGraphs):
    """Graphs of a language model. They fit calls that give labels, tensors as at capture, and nothing else."""

    def replay(self, args: tuple, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the losses of a call by a replay; None if the graphs do not fit it."""
        given = self.by_name(args, kwargs)
        inputs = self.inputs_of(given) if given.get("labels") is not None else None
        return None if inputs is None else self.passes(inputs)

    def shape_of(self, given: Mapping[str, Any]) -> tuple[int, int]:
        sequences, tokens = given["labels"].shape
        return tokens, sequences


class EvaluatedModelGraphs(_OfModel):
    """The graph of a language model in evaluation."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, which is in evaluation mode, without grad, by a replay if possible."""
        losses = self.replay(args, kwargs)
        if losses is not None:
            return losses
        self.passes.before_eager_forward()
        return type(self.module).forward(self.module, *args, **kwargs)


class ModelGraphs(_OfModel):
    """Stands for the ``forward`` of a language model, and replays its graphs where they fit the call.

    They fit calls for training and, once there is a graph of it, for evaluation, as long as the modules are what they
    were. The model runs eagerly in any other call.

    Attributes:
        evaluation: The graph of evaluation; None without one.
    """

    evaluation: EvaluatedModelGraphs | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, by a replay if possible."""
        if is_training(self.module):
            losses = self.replay(args, kwargs)
            if losses is not None:
                return losses
        elif self.evaluation is not None and not self.module.training and _may_replay_evaluation():
            return self.evaluation(*args, **kwargs)
        if torch.is_grad_enabled():
            self.passes.before_eager_forward()
        return type(self.module).forward(self.module, *args, **kwargs)


def _may_replay_evaluation() -> bool:
    """Whether the current modes allow it. A backward pass that calls the model may be using what a replay releases."""
    return may_replay_evaluation() and torch._C._current_graph_task_id() == -1


def capture_whole_model(
    model: Any,
    owner: Any,
    seq_length: int,
    micro_batch_size: int,
    num_warmup_iters: int,
    eager_passes: EagerPasses,
    quantized: RecordedQuantization | None = None,
) -> ModelGraphs:
    """Capture the passes of ``model``, whose calls replay them from then on.

    Args:
        model: The language model.
        owner: Megatron-FSDP's ``WholeModel`` of it.
        seq_length: Tokens in a sequence, before any parallel division.
        micro_batch_size: Sequences in a micro-batch.
        num_warmup_iters: How often both passes run before.
        eager_passes: Counts calls for training with tensors of another shape.
        quantized: How the model is quantized; None if it is not.
    """
    inputs = sample_inputs(model, seq_length, micro_batch_size)
    passes = WholePasses(type(model).__name__, inputs, owner, quantized=quantized)
    held = None if quantized is None else quantized.tensors
    with _captured(model, owner, inputs, seq_length, passes, num_warmup_iters, quantized=held) as captured:
        return ModelGraphs(model, passes, inputs, eager_passes, **captured)


def capture_evaluation(
    model: Any, owner: Any, seq_length: int, micro_batch_size: int, num_warmup_iters: int
) -> EvaluatedModelGraphs:
    """Capture the forward pass of ``model``, which is in evaluation mode, without grad.

    Args:
        model: The language model, whose training has graphs. It is not quantized.
        owner: Megatron-FSDP's ``EvaluatedModel`` of it.
        seq_length: Tokens in a sequence.
        micro_batch_size: Sequences in a micro-batch.
        num_warmup_iters: How often the pass runs before.
    """
    inputs = sample_inputs(model, seq_length, micro_batch_size)
    passes = WholePasses(f"{type(model).__name__} in evaluation", inputs, owner, has_backward=False)
    with _captured(model, owner, inputs, seq_length, passes, num_warmup_iters) as captured:
        return EvaluatedModelGraphs(model, passes, inputs, EagerPasses(), stands=False, **captured)


@contextmanager
def _captured(
    model: Any,
    owner: Any,
    inputs: Mapping[str, torch.Tensor],
    seq_length: int,
    passes: WholePasses,
    num_warmup_iters: int,
    **conditions: Any,
) -> Iterator[dict[str, Any]]:
    """Capture ``passes`` of ``model`` and yield further arguments of ``ModelGraphs``; reset them after an exception.

    Args:
        model, owner, seq_length, num_warmup_iters: As of ``capture_whole_model``.
        inputs: Static inputs of the passes.
        passes: The passes.
        conditions: Further arguments of ``ReplayConditions``.
    """
    # Imports TransformerEngine's wrappers, which import cuda_graphs, which imports this module.
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    def run(**given: torch.Tensor) -> torch.Tensor:
        arguments = {"attention_mask": None} | from_static_offsets(given, seq_length)
        losses: torch.Tensor = type(model).forward(model, **arguments)
        return losses

    unused = UNUSED if {"attention_mask", *OFFSETS} & inputs.keys() else (*UNUSED, "attention_mask")
    kept: list[Any] = []  # rotary embeddings are cached where they are computed, and may leave the cache
    reads = AttributeReads()
    try:
        with owner.capture():
            with reads.noted([model]), ExitStack() as stack:
                for module in model.modules():
                    if isinstance(module, RotaryEmbedding):
                        stack.callback(module.register_forward_hook(lambda *call: kept.append(call[-1])).remove)
                passes.capture(run, model, num_warmup_iters)
            noted = ReplayConditions([model], reads, [model], forward_replaced=True, buffers=True, **conditions)
        yield {"conditions": noted, "may_be_absent": ("attention_mask",), "unused": unused, "kept": kept}
    except BaseException:
        passes.reset()
        raise
