"""The buckets that passes take while an engine captures them one after the other."""

from collections.abc import Sequence
from typing import Any

import torch

from .pipelines import buckets_of_other_units, free_gradients, release_buckets


class CaptureBuckets:
    """The buckets of one capture.

    Gradient buckets are freed one unit late, as in training, so that units take the two buffers in turn: where a unit's
    buckets go first, they belong.

    Args:
        fsdp: The wrapper, whose modules hold raw parameters.
    """

    def __init__(self, fsdp: Any, modules: Sequence[torch.nn.Module]):
        self._fsdp = fsdp
        self._others = buckets_of_other_units(fsdp, modules)
        self._ran_backward: set[torch.nn.Module] = set()
        self._holds_gradients: torch.nn.Module | None = None

    def gathered(self) -> None:
        """Let nothing be in flight, and release what was prefetched for modules that do not run: no hook does it."""
        self._fsdp.all_gather_pipeline.settle()
        release_buckets(self._fsdp, self._others)

    def backward_begins(self, module: torch.nn.Module) -> None:
        """Before a backward pass of ``module``, make sure that its gradient buckets can go where they belong.

        The last unit of a pass still holds its buckets when the next pass begins, perhaps in the same place.
        """
        if module in self._ran_backward:
            self.free_gradients()

    def backward_done(self, module: torch.nn.Module) -> None:
        """After a backward pass of ``module``, free the gradient buckets of the unit before."""
        if self._holds_gradients is not module:
            self.free_gradients()
        self._holds_gradients = module
        self._ran_backward.add(module)

    def free_gradients(self) -> None:
        """Free the gradient buckets of the unit that ran last."""
        if self._holds_gradients is not None:
            bucket_of = self._fsdp.param_and_grad_buffer.param_to_param_group
            free_gradients(self._fsdp, {bucket_of[param] for param in self._holds_gradients.parameters()})
            self._holds_gradients = None
