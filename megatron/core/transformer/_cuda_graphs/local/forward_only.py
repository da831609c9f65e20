"""Graphs of training in passes without gradients: evaluation, log-probabilities of reinforcement learning.

They are replayed if they compute the same as eager code. A training pass may differ: it applies dropout, or updates
buffers and the metrics of MoE layers. Then the layer runs eagerly.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from ..engine.rng import generator_states, preserve_rng
from ..replay_conditions import AttributeReads, ReplayConditions
from .arguments import leaves_of


def written_state(module: torch.nn.Module) -> list[tuple[int, int]]:
    """Return the addresses and versions of the tensors that a pass of ``module`` may write besides its outputs.

    These are its buffers, and the metrics of MoE layers. The versions show whether a captured pass writes them.
    """
    logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    metrics = {} if logging is None else logging.get_moe_metrics_tracker().metrics
    tensors = (*module.buffers(), *(entry.values for entry in metrics.values()))
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors if not tensor.is_inference()]


class Evaluation:
    """Finds out whether a module computes the same in evaluation as its graph of training.

    Attributes:
        is_as_training: Whether it does; None before ``compare``.
    """

    def __init__(self) -> None:
        self.is_as_training: bool | None = None
        self._conditions: ReplayConditions | None = None

    def compare(self, module: torch.nn.Module, eager: Callable[[], Any], replay: Callable[[], Any]) -> Any:
        """Run ``eager`` and ``replay`` of ``module``, and compare their outputs and the number of random draws.

        The host waits for both, so this runs once per runner. Returns the result of ``eager``.
        """
        reads = AttributeReads()
        before = _random_state()
        with reads.noted([module]):
            expected = eager()
        self._conditions = ReplayConditions([module], reads, parameters=False)
        drawn = _random_state()
        with preserve_rng():
            for generator, value in zip(_generators(), before, strict=True):
                generator.set_state(value)
            found = replay()
            draws_as_many = all(map(torch.equal, _random_state(), drawn))
        self.is_as_training = draws_as_many and _are_equal(leaves_of(expected), leaves_of(found))
        return expected

    def has_changed(self) -> bool:
        """Whether the module reads something else now than when it was compared."""
        return self._conditions is not None and self._conditions.have_changed()


def _generators() -> list[torch.Generator]:
    return [torch.cuda.default_generators[torch.cuda.current_device()], *generator_states()]


def _random_state() -> list[torch.Tensor]:
    return [generator.get_state() for generator in _generators()]


def _are_equal(expected: list[Any], found: list[Any]) -> bool:
    if len(expected) != len(found):
        return False
    for one, other in zip(expected, found, strict=True):
        if isinstance(one, torch.Tensor):
            if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or not torch.equal(one, other):
                return False
        elif one is not other and one != other:
            return False
    return True
