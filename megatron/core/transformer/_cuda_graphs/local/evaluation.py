"""Whether a module computes the same in evaluation as its graph of training, which then serves both.

A training pass may differ: it applies dropout, or updates buffers and the metrics of MoE layers. Then evaluation runs
eagerly.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..attribute_reads import AttributeReads
from ..engine.rng import device_generators, preserve_rng
from ..replay_conditions import ReplayConditions
from .arguments import leaves_of


class Evaluation:
    """Compares a pass in evaluation with a replay of the graph of training.

    Attributes:
        is_as_training: Whether both computed the same; None before ``compare``.
    """

    def __init__(self) -> None:
        self.is_as_training: bool | None = None
        self._conditions: ReplayConditions | None = None

    def compare(self, module: torch.nn.Module, eager: Callable[[], Any], replay: Callable[[], Any]) -> Any:
        """Run ``replay`` and ``eager`` of ``module``, and compare their outputs and the number of random draws.

        The host waits for both, so this runs once per runner. Returns the result of ``eager``.
        """
        with preserve_rng():
            found = replay()
            drawn = _random_state()
        reads = AttributeReads()
        with reads.noted([module]):
            expected = eager()
        self._conditions = ReplayConditions(module, reads, hooks_run=False, parameters=False)
        pairs = [leaves_of(expected), leaves_of(found)]
        same = all(map(torch.equal, _random_state(), drawn)) and len(pairs[0]) == len(pairs[1])
        self.is_as_training = same and all(map(_are_equal, *pairs))
        return expected

    def has_changed(self) -> bool:
        """Whether the module reads something else now than when it was compared."""
        return self._conditions is not None and self._conditions.have_changed()


def _random_state() -> list[torch.Tensor]:
    return [generator.get_state() for generator in device_generators()]


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return one is other or one == other
