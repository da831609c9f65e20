"""Who deals with parameters and gradients in a pass of a module: the only place that decides it."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from megatron.core.transformer._cuda_graphs.replacements import Replacements, replaced_attribute

from .unit import Direction


class Runner(Protocol):
    """Deals with the parameters and gradients of a module in one kind of passes: see ``runners``.

    Attributes:
        params: The parameters that are gathered for its graphs; empty for a pass without.
        frames_backward: Whether the replay of the backward graph calls ``before_backward`` and ``after_backward``
            itself; otherwise autograd has to.
        records_reductions: Whether a graph of the backward pass holds what reduces its gradients.
    """

    params: list[torch.nn.Parameter]
    frames_backward: bool
    records_reductions: bool

    def gather(self, direction: Direction, prefetch: bool = True) -> None:
        """Gather the parameters for a pass, wait for them, and ``prefetch`` those of the units after it."""

    def release(self, direction: Direction, lazy: bool = False) -> None:
        """Release the parameters; ``lazy`` leaves it to the next gather that needs the memory."""

    def before_backward(self) -> None:
        """Called when the backward pass of the module begins."""

    def after_backward(self) -> None:
        """Called when it is over: handle the gradients that are left, and release the parameters."""

    def take(self, param: torch.nn.Parameter) -> None:
        """Called when the gradient of ``param`` is complete, if ``BackwardPass.takers`` has this runner for it."""

    def gather_beside_replays(self, direction: Direction) -> bool:
        """Gather for an eager pass as other ranks do that replay it, if that is otherwise; return whether it is."""

    def in_order(self, params: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
        """Return ``params``, which an eager pass has taken, as replays hand them to reductions one after another."""


class Registry:
    """The runners of one ``MegatronFSDP``.

    A pass is that of the capture under way, or of the graphs that the module's call replays, or an eager one. Whoever
    runs it forward writes the runner into autograd's graph; the backward pass reads nothing of the module.

    Args:
        make_eager: Makes the runner of a module's eager passes.
        is_own: Whether a module is the wrapper's; copies of it have its hooks, and must not be kept alive here.

    Attributes:
        graphed: The runners of modules with graphs for training, layers that are recorded together among them.
        captured: Those of modules that are being captured; None while no capture is under way.
        whole_model: The ``WholeModel`` that owns graphs of the whole model's passes; None without such graphs.
    """

    def __init__(self, make_eager: Callable[[torch.nn.Module], Runner], is_own: Callable[[torch.nn.Module], bool]):
        self._make_eager, self._is_own = make_eager, is_own
        self._eager: dict[torch.nn.Module, Runner] = {}
        self.graphed: dict[torch.nn.Module, Runner] = {}
        self.captured: Mapping[torch.nn.Module, Runner] | None = None
        self.whole_model: Any = None

    def of(self, module: torch.nn.Module) -> Runner:
        """Return the runner of the current pass; ``module.replaying`` exists while the module's call replays.

        A schedule that does not call the module has no such call; it names the runner itself.
        """
        runners: Mapping[torch.nn.Module, Runner] = self._eager
        if self.captured is not None:
            runners = self.captured
        elif "replaying" in module.__dict__:
            runners = self.graphed
        runner = runners.get(module) or self._eager.get(module)
        if runner is None:
            runner = self._make_eager(module)
            if self._is_own(module):
                self._eager[module] = runner
        return runner

    @property
    def has_graphs(self) -> bool:
        """Whether there are graphs for training, or a capture is under way."""
        return bool(self.graphed) or self.whole_model is not None or self.captured is not None

    @property
    def records_reductions(self) -> bool:
        """Whether graphs for training hold what reduces gradients, or a capture records it."""
        runners = self.graphed if self.captured is None else self.captured
        return self.whole_model is not None or any(runner.records_reductions for runner in runners.values())

    def taken_in_replays(self, module: torch.nn.Module, params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Return those of ``params``, of the unit ``module``, whose gradients replays handle at the end of its pass."""
        if self.whole_model is not None:
            return params
        runner = self.graphed.get(module)
        return [] if runner is None else runner.params

    def capturing(self, runners: Mapping[torch.nn.Module, Runner]) -> Replacements:
        """Return a context in which a capture is under way, with these runners of the modules that are captured."""
        return replaced_attribute([self], "captured", lambda none: runners)
