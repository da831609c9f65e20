"""Takes the gradients of a graphed FSDP unit inside its backward graph, which writes them to their buckets."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core.transformer._cuda_graphs.engine.captured import GraphOwner

from .context import Context
from .runners import Facts, Planned


class UnitSink(GraphOwner):
    """Owns the graphs of one FSDP unit.

    Args:
        before, after: Called with the unit before and after each replay of the backward graph, if ``facts.whole``:
            ``FsdpHooks.unshard_for_backward`` and ``release_after_backward``.

    Attributes:
        runner: The runner of replays; None until the capture has succeeded.
    """

    def __init__(
        self,
        context: Context,
        module: torch.nn.Module,
        facts: Facts,
        before: Callable[..., object],
        after: Callable[[torch.nn.Module], object],
    ):
        self._context, self._module, self._facts = context, module, facts
        self._before, self._after = before, after
        self.runner: Planned | None = None

    def take(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Move ``grads`` to their buckets; return those that Megatron-FSDP handles at another time."""
        taken: list[Any] = []
        left: list[torch.Tensor | None] = []
        for param, grad in zip(params, grads, strict=True):
            if handled_later(param) or (grad is None and not self._facts.whole):
                left.append(grad)
                continue
            left.append(None)
            param.grad = grad  # None, of a parameter that is not used, counts as zeros
            taken.append(param)
        with torch.no_grad():
            self._context.gradients.accumulate(taken)
        self._facts.written |= frozenset(taken)
        return left

    def before_backward(self) -> None:
        """Gather parameters and claim buckets before a replay of the whole module."""
        if self._facts.whole:
            self._before(self._module, runner=self.runner)

    def after_backward(self) -> None:
        """Note the gradients, and after a replay of the whole module reduce and release."""
        if self._facts.whole:
            self._after(self._module)
        elif self.runner is not None:
            self.runner.gradients_written()


def has_gradient_hooks(param: torch.Tensor) -> bool:
    """Whether ``param`` has hooks beside the one of Megatron-FSDP: autograd calls them, and no graph does."""
    return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks or ()) > 1


def handled_later(param: torch.Tensor) -> bool:
    """Whether the gradient is completed elsewhere: by a delayed pass, or by other modules that share the parameter."""
    return getattr(param, "skip_backward_post_hook", False) or getattr(param, "_is_shared", False)
