"""What stands for the ``forward`` of a module, and decides for each call whether graphs are replayed."""

import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch

from ..eager_passes import EagerPasses
from ..engine.captured import GraphedCallable, GraphOwner, capture_passes
from ..engine.plan import Plan
from ..engine.quantization import RecordedQuantization
from ..expected_inputs import DefaultInputs, ExpectedInputs
from ..packed_sequences import ADVICE, OFFSETS, unpack
from ..replacements import TakenForward
from ..snapshot import PassState, Snapshot, memory_aspects, module_aspects, named, quantized_aspect
from .training_calls import arguments_by_name

_MASK = "attention_mask"
logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


def whole_passes(
    name: str,
    func: Callable[..., torch.Tensor],
    inputs: dict[str, torch.Tensor],
    module: torch.nn.Module,
    owner: GraphOwner,
    quantized: RecordedQuantization | None,
    copies_results: bool = True,
) -> GraphedCallable:
    """Return ``func``, which uses ``module``, as a callable whose graphs will hold all that its passes do.

    Args:
        inputs: Static inputs, by keyword. Those that require grad must be leaves.
        quantized: How the module is quantized; None if it is not.
    """
    return GraphedCallable(
        name,
        func,
        (),
        inputs,
        module=module,
        owner=owner,
        quantized=quantized,
        context=nullcontext if quantized is None else quantized.reading_flag,
        holds_hooks=True,
        copies_results=copies_results,
        allow_unused_input=True,
    )


@contextmanager
def captured(
    slots: Mapping[torch.nn.Module, Sequence[GraphedCallable]],
    owners: Sequence[Any],
    plan: Plan,
    num_warmup_iters: int,
    around: AbstractContextManager[None],
    training: bool = True,
) -> Iterator[dict[torch.nn.Module, Snapshot]]:
    """Capture passes, and yield a snapshot for each module; reset them after an exception.

    Args:
        slots: The passes of each module whose ``forward`` they will stand for, in the order of the plan's slots.
        owners: Megatron-FSDP's ``RecordedPasses`` of what is captured.
        plan: The order of passes.
        num_warmup_iters: How often all of them run before.
        around: The context in which they run.
        training: Whether backward passes are captured.
    """
    every = [passes for own in slots.values() for passes in own]
    quantized = dict.fromkeys(each.quantized for each in every if isinstance(each.quantized, RecordedQuantization))
    state = PassState(slots)
    try:
        with ExitStack() as capturing:
            for owner in owners:
                capturing.enter_context(owner.capture())
            with state, around:
                capture_passes(
                    plan,
                    every,
                    num_warmup_iters=num_warmup_iters,
                    training=training,
                    shares_memory=True,
                    contexts=[each.capturing() for each in quantized],
                )
            snapshots = {}
            for module, (passes, *_) in slots.items():
                recorded = passes.quantized if isinstance(passes.quantized, RecordedQuantization) else None
                modules = named(module, parts=None if passes.module in (None, module) else [passes.module])
                snapshots[module] = Snapshot(
                    "replays go on once it is changed back",
                    *module_aspects(modules, around=module, replaced=module, volatile=state.volatile),
                    *memory_aspects(modules, volatile=state.volatile),
                    *(() if recorded is None else [quantized_aspect(recorded.tensors)]),
                )
        yield snapshots
    except BaseException:
        for passes in every:
            passes.reset()
        raise


class ForwardGraphs:
    """Replaces ``module.forward`` while graphs of its passes, or of a part of them, exist.

    In calls without an attention mask the graphs read the mask of the capture.

    Args:
        slots: The graphs, captured: one pair, or one for each micro-batch of a step. Their static inputs have the names
            of arguments of ``forward``.
        eager_passes: Counts calls for training that the graphs do not fit.
        snapshot: What the graphs rely on.
        unused: Arguments that what is captured does not depend on.
        kept: Tensors that the graphs read and others may let go of.
        stands: Whether the module's calls come here.
    """

    def __init__(
        self,
        module: Any,
        slots: Sequence[GraphedCallable],
        eager_passes: EagerPasses,
        snapshot: Snapshot,
        *,
        unused: Collection[str] = (),
        kept: Sequence[Any] = (),
        stands: bool = True,
    ):
        self.module, self.slots = module, slots
        self._eager_passes, self._snapshot, self._kept = eager_passes, snapshot, kept
        self._order = list(inspect.signature(type(module).forward).parameters)[1:]
        inputs = slots[0].kwargs
        self._names = list(inputs)
        self._known = frozenset((*inputs, *unused))
        self._defaults = DefaultInputs()
        self._expected = ExpectedInputs(type(module).__name__, list(inputs.values()), self._names.__getitem__)
        self._shape = self.shape_of(inputs)
        self._packed_tokens = int(inputs[OFFSETS[0]][-1]) if OFFSETS[0] in inputs else 0
        self._taken = TakenForward(module, self) if stands else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass, by a replay if possible."""
        raise NotImplementedError

    def shape_of(self, given: Mapping[str, Any]) -> tuple[int, int]:
        """Return the tokens of a sequence on this rank and the sequences of a micro-batch, given arguments by name."""
        raise NotImplementedError

    def by_name(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        return arguments_by_name(self._order, args, kwargs)

    def before_eager_forward(self) -> None:
        """Prepare a forward pass with grad that runs eagerly."""
        if self.passes.owner is not None:
            self.passes.owner.before_eager_forward()

    @property
    def passes(self) -> GraphedCallable:
        """The graphs of the first slot."""
        return self.slots[0]

    def inputs_of(self, given: dict[str, Any], passes: GraphedCallable) -> list[torch.Tensor] | None:
        """Return the inputs of a replay, in the order of the static ones; None if the graphs do not fit this call.

        Why they do not is logged, once for each reason.

        Args:
            given: The arguments of the call by name; gets offsets in the place of packed sequences.
        """
        packed_otherwise = ""
        if self._packed_tokens:
            packed_otherwise = unpack(given, self._packed_tokens * self.shape_of(given)[0] // self._shape[0])
        mask = passes.kwargs.get(_MASK)
        unmasked = given.get(_MASK) is None
        inputs: list[Any] = [mask if unmasked and name == _MASK else given.get(name) for name in self._names]
        others = [name for name, value in given.items() if value is not None and name not in self._known]
        changed = self._snapshot.changed()
        if not (others or changed) and self._expected.accepts(inputs):
            if mask is not None:
                (self._defaults.restore if unmasked else self._defaults.will_overwrite)(_MASK, mask)
            return inputs
        shape = self.shape_of(given)
        if changed:
            reason = self._snapshot.reason()
        elif packed_otherwise:
            reason = f"it {packed_otherwise}. {ADVICE}"
        elif others:
            reason = f"it was captured without {', '.join(others)}"
        elif missing := [name for name, value in zip(self._names, inputs, strict=True) if value is None]:
            reason = f"it was captured with {', '.join(missing)}"
        else:
            reason = "other tensors than at capture" + (self._eager_passes.outlook if shape != self._shape else "")
        self._note_eager_pass(reason, shape if not others and shape != self._shape else None)
        return None

    def _note_eager_pass(self, reason: str, shape: tuple[int, int] | None = None) -> None:
        """Count a call for training that runs eagerly, and log ``reason`` if it is new; see ``EagerPasses.note``."""
        name = type(self.module).__name__
        reason = f"{name} runs eagerly where its CUDA graphs do not fit the call: {reason}"
        if self._eager_passes.note(reason, shape):
            logger.warning(reason)

    def reset(self) -> None:
        """Free the graphs, and give the module its ``forward`` back."""
        if self._taken is not None:
            self._taken.end()
            self._taken = None  # which refers to these graphs
        for passes in self.slots:
            passes.reset()
        self._kept = ()
        self._snapshot.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copied module runs eagerly."""
        copied = memo[id(self.module)]
        return MethodType(type(copied).forward, copied)
