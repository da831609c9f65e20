"""A replay of a part of a layer by a schedule that does not call the layer: its hooks do not run.

``--overlap-moe-expert-parallel-comm`` runs layers in parts, so that the experts' tokens of one micro-batch travel while
another micro-batch is computed. Megatron-FSDP then gathers parameters in hooks of the modules below a layer, and none
of those in a graph is called.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .fsdp_hooks import FsdpHooks


class GatheringReplay:
    """Gathers the parameters of a layer before its graphs read them; has the attributes of their callable.

    Attributes:
        graphed: The callable of the graphs.
    """

    def __init__(self, hooks: "FsdpHooks", module: torch.nn.Module, graphed: Callable[..., Any], backward: bool):
        """Make the replay.

        Args:
            hooks: Those of the model.
            module: The layer.
            graphed: Replays its graphs.
            backward: Whether parameters are released before the backward pass, and gathered again.
        """
        self.graphed = graphed
        self._hooks, self._module, self._backward = hooks, module, backward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the forward pass, and attach what precedes the backward pass to its output."""
        hooks, module = self._hooks, self._module
        hooks.unshard_for_forward(module)
        output = self.graphed(*args, **kwargs)
        if not self._backward:
            return output
        return hooks.attach_before_backward(hooks.unshard_for_backward, module, args, output)

    def __getattr__(self, name: str) -> Any:
        if name == "graphed":  # while it is copied
            raise AttributeError(name)
        return getattr(self.graphed, name)
