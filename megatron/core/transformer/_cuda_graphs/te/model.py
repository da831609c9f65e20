"""Graphs of whole passes of a language model or a pipeline chunk.

Forward and backward pass are separate graphs, each including its collectives. In a pipeline, each micro-batch of a
step has its own graphs.
"""

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.token_bounds import token_bounds
from megatron.core.utils import log_single_rank

from ..agreement import CaptureAgreement, warn_of_failure
from ..engine.captured import GraphedCallable, capture_passes
from ..engine.plan import Plan, unordered_plan
from ..engine.quantization import RecordedQuantization
from ..errors import CaptureFailedError
from ..evaluation_mode import may_replay_evaluation
from ..flags.options import FACTOR_FLAG
from ..hooks import has_other_hooks
from ..inputs import ADVICE, OFFSETS, DefaultInputs, from_static_offsets, unpack
from ..layer_graph import ANOTHER_SHAPE
from ..replacements import TakenForward
from ..snapshot import InputSignature, Snapshot, module_aspects, named, quantized_aspect, refuse_changed_attributes
from .capture_arguments import WARMUP_ITERATIONS, recorded_quantization
from .layers import decoder_layers, language_layers
from .sample_inputs import LayerInputs, captures_attention, sample_arguments
from .stage import Chunk, Stage
from .training_calls import (
    HIDDEN_STATES,
    OPTIONAL,
    arguments_by_name,
    call_blocker,
    expected_inputs,
    is_first,
    is_last,
    is_training,
    shape_of,
    unused_by,
)

_MASK = "attention_mask"
logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


class ModelGraphs:
    """Replaces the ``forward`` of a language model or a pipeline chunk while graphs of its passes exist.

    A call replays if it has the captured arguments with the captured shapes and dtypes, its step has as many
    micro-batches as at capture, and no state that the graphs depend on has changed. Other calls run eagerly. If a call
    has no attention mask, the graphs read the captured mask.

    Args:
        slots: The captured graphs: one pair in total, or one per micro-batch of a step. Static inputs are named after
            the arguments of ``forward``.
        snapshot: State that the graphs depend on.
        kept: Tensors that the graphs read and that must be kept alive.
        training: Whether the graphs replace ``forward``. Evaluation graphs do not: the training graphs call them.

    Attributes:
        evaluation: The graph of the evaluation forward pass; None if there is none.
    """

    evaluation: "ModelGraphs | None" = None

    def __init__(
        self,
        module: Any,
        slots: Sequence[GraphedCallable],
        snapshot: Snapshot,
        *,
        kept: Sequence[Any] = (),
        training: bool = True,
    ):
        self.module, self.slots = module, slots
        self._snapshot, self._kept = snapshot, kept
        self._logged: set[str] = set()
        self._order = list(inspect.signature(type(module).forward).parameters)[1:]
        inputs = slots[0].kwargs
        self._names = list(inputs)
        unused = unused_by(module) | (set() if any(map(captures_attention, language_layers(module))) else {_MASK})
        self._known = frozenset((*inputs, *unused))
        self._defaults = DefaultInputs()
        self._expected = InputSignature(type(module).__name__, list(inputs.values()), self._names.__getitem__)
        self._taken = TakenForward(module, self) if training else None

    def by_name(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, keyed by name."""
        return arguments_by_name(self._order, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, with a replay if possible."""
        if self._taken is None:  # called by a wrapper of ``module.forward`` that outlives the graphs
            return type(self.module).forward(self.module, *args, **kwargs)
        graphs: ModelGraphs | None = None
        if is_training(self.module):
            graphs = self
        elif self.evaluation is not None and not self.module.training and _may_replay_evaluation():
            graphs = self.evaluation
        if graphs is not None:
            given = self.by_name(args, kwargs)
            slot = graphs._slot_of(given)
            inputs = None if slot is None else graphs.inputs_of(given, slot)
            if slot is not None and inputs is not None:
                return slot.replay(inputs)
        if graphs is not None or torch.is_grad_enabled():
            (graphs or self).before_eager_forward()
        return type(self.module).forward(self.module, *args, **kwargs)

    def before_eager_forward(self) -> None:
        """Call the owner's ``before_eager_forward``; other ranks may replay the pass."""
        self.slots[0].owner.before_eager_forward()

    def _slot_of(self, given: dict[str, Any]) -> GraphedCallable | None:
        """Return the graphs of the current micro-batch; None if the number of micro-batches differs from capture.

        Add the hidden states of the previous pipeline stage to ``given``. All micro-batches share one evaluation graph
        because no backward pass reads its output.
        """
        model = self.module
        if HIDDEN_STATES in self.slots[0].kwargs:
            given[HIDDEN_STATES] = model.decoder.input_tensor
        if not model.training or (is_first(model) and is_last(model)):
            return self.slots[0]
        number = getattr(decoder_layers(model)[0], "current_microbatch", None)
        if number is None or number >= len(self.slots) or get_num_microbatches() != len(self.slots):
            self._log_eager_pass(f"captured for steps of {len(self.slots)} micro-batches in a pipeline schedule")
            return None
        return self.slots[number]

    def inputs_of(self, given: dict[str, Any], slot: GraphedCallable) -> list[torch.Tensor] | None:
        """Return the inputs of a replay in the order of the static inputs; None if the call does not match the graphs.

        Each mismatch is logged once.

        Args:
            given: The arguments of the call, keyed by name. Packed sequences are replaced by their offsets in place.
        """
        packed_otherwise = ""
        if OFFSETS[0] in slot.kwargs and (shape := shape_of(self.module, given)) is not None:
            packed_otherwise = unpack(given, shape[0] * self.module.config.context_parallel_size)
        mask = slot.kwargs.get(_MASK)
        unmasked = given.get(_MASK) is None
        inputs: list[Any] = [mask if unmasked and name == _MASK else given.get(name) for name in self._names]
        others = [name for name, value in given.items() if value is not None and name not in self._known]
        changed = self._snapshot.changed()
        if not (others or changed) and self._expected.accepts(inputs):
            if mask is not None:
                (self._defaults.restore if unmasked else self._defaults.will_overwrite)(_MASK, mask)
            return inputs
        if changed:
            reason = self._snapshot.reason()
        elif packed_otherwise:
            reason = f"the module {packed_otherwise}. {ADVICE}"
        elif others:
            reason = f"captured without {', '.join(others)}"
        elif missing := [name for name, value in zip(self._names, inputs, strict=True) if value is None]:
            reason = f"{', '.join(missing)} is missing"
        else:
            reason = f"tensors have other shapes, dtypes or devices than at capture. {ANOTHER_SHAPE}"
        self._log_eager_pass(reason)
        return None

    def _log_eager_pass(self, reason: str) -> None:
        """Log why a training call runs eagerly, each ``reason`` once."""
        name = type(self.module).__name__
        reason = f"{name} runs eagerly because its CUDA graphs do not fit the call: {reason}"
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning(reason)

    def reset(self) -> None:
        """Free the graphs, including evaluation graphs, and restore ``module.forward``."""
        if self.evaluation is not None:
            self.evaluation.reset()
            self.evaluation = None
        if self._taken is not None:
            self._taken.end()
            self._taken = None  # break the reference cycle
        for slot in self.slots:
            slot.reset()
        self._kept = ()
        self._snapshot.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the copied module's original ``forward``, so that the copy runs eagerly."""
        copied = memo[id(self.module)]
        return MethodType(type(copied).forward, copied)


def _may_replay_evaluation() -> bool:
    """Return whether evaluation may replay: never during a backward pass, whose memory a replay could overwrite."""
    return may_replay_evaluation() and torch._C._current_graph_task_id() == -1


def capture_models(
    models: Sequence[Any],
    owners: Sequence[Any],
    plan: Plan,
    shape: tuple[int, int],
    num_warmup_iters: int,
    quantized: Sequence[RecordedQuantization | None],
    *,
    given: Collection[str],
    training: bool = True,
) -> list[ModelGraphs]:
    """Capture the passes of ``models``; with ``training``, later calls replay them. On an exception, free all graphs.

    Args:
        models: The language model, or its chunks in a pipeline stage: the callables of ``plan``.
        owners: Megatron-FSDP's ``RecordedPasses`` of each model.
        shape: Sequence length before any sharding, and micro-batch size.
        num_warmup_iters: Iterations of the whole plan before the capture.
        quantized: The quantization of each model, or None.
        given: The arguments that calls have, of those in ``OPTIONAL``.
        training: Whether to capture backward passes. Otherwise models must be in evaluation mode.
    """
    slots: defaultdict[Any, list[GraphedCallable]] = defaultdict(list)
    for index, inputs in zip(plan.callable_of_slot, inputs_of_slots(models, plan, *shape, given), strict=True):
        model, own = models[index], slots[models[index]]
        name = type(model).__name__ + ("" if training else " in evaluation")
        if len(plan.slots_of_callables[index]) > 1:
            name += f" (chunk {index}, micro-batch {len(own)})"
        graphed = GraphedCallable(
            name,
            partial(_forward, model, shape[0]),
            (),
            inputs,
            module=model,
            owner=owners[index],
            quantization=quantized[index],
            holds_hooks=True,
            allow_unused_input=True,
        )
        own.append(graphed)
    every = [slot for own in slots.values() for slot in own]
    kept: list[Any] = []
    graphs: list[ModelGraphs] = []
    try:
        with ExitStack() as capturing:
            for owner in owners:
                capturing.enter_context(owner.capture())
            with refuse_changed_attributes(models), _around_passes(models, kept):
                capture_passes(
                    plan,
                    every,
                    num_warmup_iters=num_warmup_iters,
                    shares_memory=True,
                    contexts=[each.preserved() for each in quantized if each is not None],
                )
            snapshots = []
            for model, recorded in zip(models, quantized, strict=True):
                snapshot = Snapshot(
                    "replays resume once it is changed back",
                    *module_aspects(named(model), around=model, replaced=model),
                    *(() if recorded is None else [quantized_aspect(recorded.tensors)]),
                )
                snapshots.append(snapshot)
        for (model, own), snapshot in zip(slots.items(), snapshots, strict=True):
            graphs.append(ModelGraphs(model, own, snapshot, training=training, kept=kept))
    except BaseException:
        for made in graphs:
            made.reset()
        for slot in every:
            slot.reset()
        raise
    return graphs


def inputs_of_slots(
    models: Sequence[Any], plan: Plan, seq_length: int, micro_batch_size: int, given: Collection[str]
) -> list[dict[str, torch.Tensor]]:
    """Return the static inputs of each slot of ``plan``, shared between slots that are not in use together."""
    samples = sample_arguments(
        plan,
        lambda index: ((), sample_inputs(models[index], seq_length, micro_batch_size, given)),
        lambda index: index,  # models may differ in their inputs
    )
    return [inputs for _, inputs in samples]


def sample_inputs(
    model: Any, seq_length: int, micro_batch_size: int, given: Collection[str]
) -> dict[str, torch.Tensor]:
    """Create static inputs of ``model``, keyed by name, including ``hidden_states`` from the previous stage.

    Shapes and dtypes match ``expected_inputs`` and the first layer's hidden states. Arguments in ``OPTIONAL`` must be
    ``given``. The attention mask is the layers' default mask; a model without attention has no mask.
    """
    of_layers = LayerInputs(model.config, seq_length, micro_batch_size)
    attention = next(filter(captures_attention, language_layers(model)), None)
    _, of_attention = ((), {}) if attention is None else of_layers.make(attention, None, _MASK in given)
    expected = expected_inputs(model, seq_length // model.config.context_parallel_size, micro_batch_size)
    for name in {_MASK, *OPTIONAL.difference(given)}:
        expected.pop(name, None)
    inputs = {name: torch.zeros(shape, dtype=dtype, device="cuda") for name, (shape, dtype) in expected.items()}
    if "loss_mask" in inputs:
        inputs["loss_mask"].fill_(1)
    if not is_first(model):
        (hidden_states,), _ = of_layers.make(decoder_layers(model)[0], None, masked=False)
        inputs[HIDDEN_STATES] = hidden_states
    return inputs | of_attention


@contextmanager
def _around_passes(models: Iterable[Any], kept: list[Any]) -> Iterator[None]:
    """Context manager for warm-up and capture that appends rotary embedding outputs to ``kept``: caches may evict them.

    On exit, it restores the input tensor of each chunk except the first. An evaluation call that started the capture
    reads this tensor afterwards.
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
    absent = dict.fromkeys(("input_ids", "position_ids", _MASK))
    return type(model).forward(model, **(absent | from_static_offsets(given, seq_length)))


def capture_for_evaluation(stage: Stage, chunk: Chunk, training: ModelGraphs, args: tuple, kwargs: Any) -> None:
    """Capture the forward pass of ``chunk``, which is in evaluation mode; if that is impossible, log the reason.

    All ranks of the pipeline stage must call this together. The graph has its own static inputs and memory pool, and
    its output is copied: evaluation does not change memory that training graphs or backward passes read.

    Args:
        training: The graphs of the chunk's training passes. Nothing is captured once they have been deleted.
        args, kwargs: Arguments of the model's first evaluation call, which determine the captured shapes.

    Raises:
        CaptureInterruptedError: A different rank was interrupted.
    """
    if vars(training.module).get("forward") is not training:
        return
    try:
        refused = _capture_evaluation(stage, chunk, training, args, kwargs)
    except CaptureFailedError as failed:
        warn_of_failure(failed, "Evaluation runs eagerly")
        return
    message = f"Evaluation runs eagerly, because {refused}" if refused else "Captured the whole model for evaluation"
    log_single_rank(logger, logging.WARNING if refused else logging.INFO, message)


def _capture_evaluation(stage: Stage, chunk: Chunk, training: ModelGraphs, args: tuple, kwargs: Any) -> str:
    """Capture the evaluation graph on all ranks, or return why a rank cannot.

    If the capture fails, all ranks raise the same error.
    """
    model, given = training.module, training.by_name(args, kwargs)
    agreement = CaptureAgreement(stage.groups, with_other_stages=False)  # later stages wait for this one's output

    def undo() -> None:
        if training.evaluation is not None:
            training.evaluation.reset()
            training.evaluation = None

    with agreement.together(undo):
        hooked = any(has_other_hooks(module) for layer in chunk.layers for module in layer.modules())
        reason = "layers, or modules in them, have third-party hooks" if hooked else call_blocker(model, given)
        if token_bounds:
            reason = f"{FACTOR_FLAG} limits graphs, and only training steps can be rerun without the limit"
        if refused := agreement.blockers({"evaluation": reason})["evaluation"]:
            return refused
        tokens, sequences = shape_of(model, given) or (0, 0)
        shape = tokens * stage.config.context_parallel_size, sequences
        owner = chunk.fsdp.graphs.evaluated_model(partial(agreement.begin, "evaluation of the whole model"))
        quantized = [recorded_quantization(stage, model)]
        plan = unordered_plan(1).forward_only()
        optional = [name for name in OPTIONAL if given.get(name) is not None]
        (training.evaluation,) = capture_models(
            [model], [owner], plan, shape, WARMUP_ITERATIONS, quantized, given=optional, training=False
        )
    return ""
