"""A replay of a part of a layer by a schedule that does not call the layer: its hooks do not run.

``--overlap-moe-expert-parallel-comm`` runs layers in parts, so that the experts' tokens of one micro-batch travel while
another micro-batch is computed. Megatron-FSDP then gathers parameters in hooks of the modules below a layer, and none
of those in a graph is called.
"""

from collections.abc import Callable
from typing import Any


class GatheringReplay:
    """Gathers the parameters of a layer before its graphs read them; has the attributes of their callable.

    Args:
        graphed: Replays the graphs.
        before: Called before the forward pass.
        after: Called with its arguments and its output after the forward pass, returns the output to take in its place;
            None for nothing.

    Attributes:
        graphed: The argument.
    """

    def __init__(
        self, graphed: Callable[..., Any], before: Callable[[], None], after: Callable[[tuple, Any], Any] | None
    ):
        self.graphed = graphed
        self._before, self._after = before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the forward pass, and attach what precedes the backward pass to its output."""
        self._before()
        output = self.graphed(*args, **kwargs)
        return output if self._after is None else self._after(args, output)

    def __getattr__(self, name: str) -> Any:
        if name == "graphed":  # while it is copied
            raise AttributeError(name)
        return getattr(self.graphed, name)
