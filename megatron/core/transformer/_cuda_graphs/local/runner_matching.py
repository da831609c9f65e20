"""Which calls the graphs of a runner can be replayed for."""

from typing import Any

import torch

from ..errors import ArgumentError
from .arguments import tensors_of
from .mismatch import mismatches
from .nodes import _GraphStatus
from .runner_state import RunnerState


class RunnerMatching(RunnerState):
    """Compares a call with the one that was recorded."""

    def get_mismatch_errors(self, args: tuple, kwargs: dict[str, Any]) -> list[str]:
        """Return a line for each argument that is not like the captured one; none if the graphs can be replayed."""
        grad_enabled = self.grad_enabled and torch.is_grad_enabled()
        return mismatches(args, kwargs, self.fwd_graph_input_arg_metas, self.fwd_graph_input_kwarg_metas, grad_enabled)

    def refuse_mismatch(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Refuse arguments that are not like those at capture.

        Raises:
            ArgumentError: says which, and how.
        """
        problems = self.get_mismatch_errors(args, kwargs)
        if problems:
            raise ArgumentError(f"{self.name} cannot replay its CUDA graph:\n" + "\n".join(problems))

    def can_differentiate(self, wants_grad: bool, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a replay on these arguments has the gradients that ``wants_grad`` asks for, or needs none."""
        if self.grad_enabled or not wants_grad:
            return True
        trained = (*tensors_of(args, kwargs), *self.module.parameters())
        return self.is_frozen and not any(tensor.requires_grad for tensor in trained)

    def can_serve_evaluation(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a call in evaluation mode, on these arguments, may be replayed now, for all that is known.

        Quantization keeps statistics of training passes. With sharded weights all layers must run alike, and some may
        have to run eagerly.
        """
        as_compared = self.evaluation.is_as_training is not False and not self.evaluation.has_changed()
        differs = not as_compared or self.changes_state or self._quantization or self._sharded
        is_free = self.fwd_graph is not None and self.status is _GraphStatus.FWD_READY
        if differs or not is_free or self._session.turns.in_flight:
            return False
        if any(part._forward_hooks or part._forward_pre_hooks for part in self.parts):  # replays run none
            return False
        try:
            return not self.get_mismatch_errors(args, kwargs) and self._session.has_parameters_of(self.function)
        except TypeError:  # an argument that only evaluation gives
            return False

    def must_run_eagerly_without_grad(self) -> bool:
        """Whether a pass without grad may not be replayed, since only one with grad changes buffers or metrics.

        Raises:
            RuntimeError: it must not run eagerly either, as its weights are sharded.
        """
        if torch.is_grad_enabled() or not (self.changes_state and self.grad_enabled):
            return False
        if self._sharded:
            raise RuntimeError(
                f"{self.name} changes buffers in training, so a pass without grad cannot replay its CUDA graph "
                "(--cuda-graph-impl local), and weights that are sharded (--tensor-parallel-num-weight-shards) let no "
                "single layer run eagerly. Call eval() on the model before passes without grad."
            )
        return True
