"""Takes the gradients of a graphed FSDP unit inside its backward graph, which writes them to their buckets."""

from collections.abc import Callable, Sequence

import torch

from megatron.core.transformer._cuda_graphs.engine import sanitizer

from .gradients import Gradients
from .unit import Unit


class UnitSink:
    """The ``GradientSink`` of one FSDP unit.

    Args:
        gradients: Megatron-FSDP's.
        unit: The unit.
        writes: Called with the parameters whose gradients the graph writes to their buckets.
        whole: Whether the graphs hold all that the module computes.
        before, after: Called before and after each replay of the backward graph; None for nothing.

    Attributes:
        whole: The argument.
        captured: The gradients in their buckets that the backward graph writes, if ``sanitizer.requested()``.
    """

    def __init__(
        self,
        gradients: Gradients,
        unit: Unit,
        *,
        writes: Callable[[list[torch.nn.Parameter]], None],
        whole: bool,
        before: Callable[[], None] | None,
        after: Callable[[], None],
    ):
        self._gradients, self._unit, self._writes = gradients, unit, writes
        self.whole = whole
        self._before, self._after = before, after
        self.captured: list[sanitizer.CapturedTensor] = []

    def take(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Move ``grads`` to their buckets; return those that Megatron-FSDP handles at another time."""
        taken = []
        left: list[torch.Tensor | None] = []
        for param, grad in zip(params, grads, strict=True):
            if handled_later(param) or (grad is None and not self.whole):
                left.append(grad)
                continue
            left.append(None)
            param.grad = grad  # None, of a parameter that is not used, counts as zeros
            taken.append(param)
        with torch.no_grad():
            self._gradients.accumulate(taken)
        self._writes(taken)
        if sanitizer.requested():
            name_of = self._gradients.name_of
            named = ((f"the gradient bucket of {name_of(param)}", param.main_grad) for param in taken)
            self.captured = sanitizer.captured(named)
        return left

    def claim_buckets(self) -> None:
        """Allocate the gradient buckets, before a capture in which that must not happen."""
        for param in self._unit.params:
            if param.requires_grad:
                param.get_main_grad()

    def before_backward(self) -> None:
        """Gather parameters and claim buckets before a replay of the whole module."""
        if self._before is not None:
            self._before()

    def after_backward(self) -> None:
        """Note the gradients, and after a replay of the whole module reduce and release."""
        self._after()


def has_gradient_hooks(param: torch.Tensor) -> bool:
    """Whether ``param`` has hooks beside the one of Megatron-FSDP: autograd calls them, and no graph does."""
    return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks or ()) > 1


def handled_later(param: torch.Tensor) -> bool:
    """Whether the gradient is completed elsewhere: by a delayed pass, or by other modules that share the parameter."""
    return getattr(param, "skip_backward_post_hook", False) or getattr(param, "_is_shared", False)
