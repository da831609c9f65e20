"""Graphs of training in passes without gradients: evaluation, log-probabilities of reinforcement learning.

They are replayed where they compute what eager code does. A training pass may compute something else: dropout, or what
it adds to buffers and to the metrics of MoE layers. Then the layer runs eagerly.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron.core.tensor_parallel.random import is_checkpointing

from ..engine.rng import generator_states, preserve_rng
from .arguments import leaves_of


def written_state(module: torch.nn.Module) -> list[tuple[int, int]]:
    """Return the addresses and versions of what a pass of ``module`` may write besides its outputs.

    That is its buffers, and the metrics of MoE layers. The versions tell whether a captured pass writes them.
    """
    logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    metrics = {} if logging is None else logging.get_moe_metrics_tracker().metrics
    tensors = (*module.buffers(), *(entry.values for entry in metrics.values()))
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors if not tensor.is_inference()]


def may_replay_evaluation() -> bool:
    """Whether evaluation, as it is called now, may be replayed at all: without grad, autocast or a checkpoint."""
    return not (
        torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cuda")
        or torch.is_autocast_enabled("cpu")
        or is_checkpointing()
    )


class Evaluation:
    """Finds out whether evaluation computes what a graph of training does.

    Attributes:
        is_as_training: Whether it does; None before ``compare``.
    """

    def __init__(self) -> None:
        self.is_as_training: bool | None = None

    def compare(self, eager: Callable[[], Any], replay: Callable[[], Any]) -> Any:
        """Run ``eager`` and ``replay``, and compare outputs and how many random numbers they draw.

        The host waits for both: this is done once. Returns what ``eager`` returns.
        """
        before = _random_state()
        expected = eager()
        drawn = _random_state()
        with preserve_rng():
            for generator, value in zip(_generators(), before, strict=True):
                generator.set_state(value)
            found = replay()
            draws_as_many = all(map(torch.equal, _random_state(), drawn))
        self.is_as_training = draws_as_many and _are_equal(leaves_of(expected), leaves_of(found))
        return expected


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
