"""What stands for the ``forward`` of a module, and decides for each call whether graphs are replayed."""

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MethodType
from typing import Any

import torch

from ..eager_passes import EagerPasses
from ..engine.whole_passes import WholePasses
from ..expected_inputs import ExpectedInputs
from ..packed_sequences import ADVICE, OFFSETS, misfit, offsets_of
from ..replay_conditions import ReplayConditions
from .training_calls import arguments_by_name

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


class ForwardGraphs:
    """Stands for the ``forward`` of ``module`` as long as there are graphs of its passes, or of a part of them.

    Args:
        module: The module.
        passes: The graphs, captured.
        inputs: Their static inputs, by the names of the arguments of ``forward``.
        eager_passes: Counts calls for training that the graphs do not fit.
        conditions: What the captured passes read of modules.
        may_be_absent: The inputs that a call may leave out, unless another call has given one: the graphs then read
            the value at capture.
        unused: Arguments that what is captured does not depend on.
        kept: Tensors that the graphs read and others may let go of.
        stands: Whether the module's calls come here.

    Attributes:
        module: The argument.
        passes: The argument.
        inputs: The argument.
    """

    def __init__(
        self,
        module: Any,
        passes: WholePasses,
        inputs: Mapping[str, torch.Tensor],
        eager_passes: EagerPasses,
        conditions: ReplayConditions,
        *,
        may_be_absent: Collection[str] = (),
        unused: Collection[str] = (),
        kept: Sequence[Any] = (),
        stands: bool = True,
    ):
        self.module, self.passes, self.inputs = module, passes, dict(inputs)
        self._eager_passes, self._conditions, self._kept = eager_passes, conditions, kept
        self._order = list(inspect.signature(type(module).forward).parameters)[1:]
        self._names = list(inputs)
        self._known = frozenset((*inputs, *unused))
        self._absent = {name: inputs[name] for name in may_be_absent if name in inputs}
        self._expected = ExpectedInputs(type(module).__name__, list(inputs.values()), self._names.__getitem__)
        self._shape = self.shape_of(inputs)
        self._packed_tokens = int(inputs[OFFSETS[0]][-1]) if OFFSETS[0] in inputs else 0
        self._warned = False
        if stands:
            module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, by a replay if possible."""
        raise NotImplementedError

    def shape_of(self, given: Mapping[str, Any]) -> tuple[int, int]:
        """Return the tokens of a sequence on this rank and the sequences of a micro-batch, given arguments by name."""
        raise NotImplementedError

    def by_name(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        return arguments_by_name(self._order, args, kwargs)

    def inputs_of(self, given: dict[str, Any]) -> list[torch.Tensor] | None:
        """Return the inputs of a replay, in the order of the static ones; None if the graphs do not fit this call.

        Why they do not is logged, once for each reason.

        Args:
            given: The arguments of the call by name; gets offsets in the place of packed sequences.
        """
        inputs: list[Any] = []
        packed_otherwise = self._unpack(given) if self._packed_tokens else ""
        for name in self._names:
            value = given.get(name)
            if name in self._absent:
                if value is None:
                    value = self._absent[name]
                else:
                    del self._absent[name]  # a replay overwrites it
            inputs.append(value)
        others = [name for name, value in given.items() if value is not None and name not in self._known]
        changed = self._conditions.have_changed()
        if not (others or changed) and self._expected.accepts(inputs):
            return inputs
        shape = self.shape_of(given)
        if not others and shape != self._shape:
            self._eager_passes.note(*shape)
        else:
            self._eager_passes.total += 1
        reason = ""
        if changed:
            reason = self._conditions.news()
        elif not self._warned:
            self._warned = True
            reason = f"it was captured without {', '.join(others)}" if others else "other tensors than at capture"
            if packed_otherwise:
                reason = f"it {packed_otherwise}. {ADVICE}"
            if shape != self._shape and not others:
                reason += self._eager_passes.outlook
        if reason:
            logger.warning(
                f"{type(self.module).__name__} runs eagerly where its CUDA graphs do not fit the call: {reason}"
            )
        return None

    def _unpack(self, given: dict[str, Any]) -> str:
        """Put offsets in the place of packed sequences in ``given``, or say why graphs do not fit them."""
        packed = given.pop("packed_seq_params", None)
        reason = misfit(packed, self._packed_tokens * self.shape_of(given)[0] // self._shape[0])
        if not reason:
            given |= offsets_of(packed)
        return reason

    def reset(self) -> None:
        """Free the graphs, and give the module its ``forward`` back."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
        self.passes.reset()
        self._kept, self._absent, self.inputs = (), {}, {}
        self._conditions.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copied module runs eagerly."""
        copied = memo[id(self.module)]
        return MethodType(type(copied).forward, copied)
