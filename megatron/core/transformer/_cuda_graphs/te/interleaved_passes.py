"""Whether training runs the backward pass of a model after a further forward pass.

Replays of a graph that serves one forward pass at a time would have overwritten what that backward pass reads.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..hooks import calls_weakly
from .training_calls import is_training


class InterleavedPasses:
    """Watches the passes of ``model`` until ``found`` is asked.

    Args:
        model: What is captured, or whose layers are, for one micro-batch at a time.
    """

    def __init__(self, model: torch.nn.Module):
        self._handle = model.register_forward_hook(calls_weakly(self._watch))
        self._passes = 0
        self._found = False

    def _watch(self, model: torch.nn.Module, args: tuple, output: Any) -> None:
        if not is_training(model):
            return
        self._passes += 1
        own = self._passes

        def backward_begins(grad: torch.Tensor) -> None:
            self._found |= own != self._passes

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(backward_begins)

    def found(self) -> bool:
        """Whether a backward pass has run whose forward pass was not the last one. Ends the watch."""
        self._handle.remove()
        return self._found
