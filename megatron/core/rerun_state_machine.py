"""Reruns of steps, which draw the same random numbers, agreed on by ranks without waiting for their devices."""

import logging
from collections import abc
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from megatron.core._rank_utils import log_single_rank
from megatron.core.token_bounds import token_bounds
from megatron_fsdp_cuda_graphs.overlay import extend

from .host_agreement import agreement_of_all_ranks

_upstream: Any = extend(__name__)
logger = logging.getLogger(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


class RerunStateMachine(_upstream.RerunStateMachine):
    """megatron-core's ``RerunStateMachine`` with four differences.

    - Losses that are NaN, infinite or unexpectedly large are looked for when the passes of the step have been launched.
      megatron-core lets the host wait for each forward pass before it launches the backward pass.
    - What ranks agree on is known to their hosts, so these agree without the device, where they can
      (``agreement_of_all_ranks``). On the device it would be reduced after most work of the step, and the optimizer's
      be given to one that has run idle by then.
    - A rerun starts from the same states of the generators that CUDA graphs draw from. megatron-core keeps the
      generators, which go on, and not their states.
    - A step in which a rank had no room for all tokens (``token_bounds``) runs again with room for all, as if it had
      not run before.
    """

    _generator_states: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()
    _agreed: bool | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._postponed: list[tuple[torch.cuda.Event, abc.Callable[[], None]]] = []
        token_bounds.clear()  # those of a training before: on some ranks its model may be there still

    def should_run_forward_backward(self, data_iterator: Any) -> bool:
        """Return whether to run the step, or to run it again, which all ranks agree on; see megatron-core."""
        self._validate_postponed()
        starts = self.state == _upstream.RerunState.NOT_RUNNING_YET
        bounded = bool(token_bounds) and self.mode == _upstream.RerunMode.VALIDATE_RESULTS
        runs = False
        if bounded and self.state == _upstream.RerunState.INITIAL_RUN:
            asked = [token_bounds.overflowed(), self.rerun_requested]
            runs, self._agreed = cast(tuple[bool, ...], self._reduce_any(asked))
        if runs:
            self._start_again(data_iterator)
        else:
            runs = super().should_run_forward_backward(data_iterator)
        if bounded and starts:
            token_bounds.begin()
        elif bounded and not runs:
            token_bounds.end()
        if runs and self.mode != _upstream.RerunMode.DISABLED:
            agreement = agreement_of_all_ranks()
            if agreement is not None:
                agreement.expect()
        return runs

    def validate_result(
        self,
        result: Any,
        rejection_func: abc.Callable[[Any], Any],
        message: str,
        comparison_func: abc.Callable[[Any, Any], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Validate a result of the step; see megatron-core. If possible that is done later, of a copy on the host."""
        validate = partial(
            super().validate_result,
            rejection_func=rejection_func,
            message=message,
            comparison_func=comparison_func,
            tolerance=tolerance,
            fatal=fatal,
        )
        if comparison_func is not None or not self._can_wait(result, rejection_func):
            self._validate_postponed()
            validate(result)
            return
        copy, copied = result.detach().to("cpu", non_blocking=True), torch.cuda.Event()
        copied.record()
        self._postponed.append((copied, partial(validate, copy)))

    def _can_wait(self, result: Any, rejection_func: abc.Callable[[Any], Any]) -> bool:
        """Return whether ``rejection_func`` says the same of a copy of ``result``, when the passes have been launched.

        That is known of megatron-core's and torch's functions. In a second run, or without reruns, an error is raised
        where the result is.
        """
        if self.mode != _upstream.RerunMode.VALIDATE_RESULTS or self.state != _upstream.RerunState.INITIAL_RUN:
            return False
        asked = rejection_func.func if isinstance(rejection_func, partial) else rejection_func
        if asked not in (torch.isnan, torch.isinf, self.is_unexpectedly_large):
            return False
        return isinstance(result, torch.Tensor) and result.is_cuda and not torch.cuda.is_current_stream_capturing()

    def _validate_postponed(self) -> None:
        postponed, self._postponed = self._postponed, []
        for copied, validate in postponed:
            copied.synchronize()
            validate()

    def _start_again(self, data_iterator: Any) -> None:
        """Let the first run of the step not have been, and the next one have room for all tokens."""
        self._restore_state()
        for each in self._sanitize_data_iterators(data_iterator):
            each.rewind()
        self.validation_counts.clear()
        self.rerun_requested, self._agreed = False, None
        self.failed_validation_call = self.initial_result = None
        if said := token_bounds.lift():
            log_single_rank(logger, logging.WARNING, said)

    def _reduce_any(self, value: bool | list[bool]) -> bool | tuple[bool, ...]:
        if self._agreed is not None:  # before, with another question
            known, self._agreed = self._agreed, None
            return known
        agreement = agreement_of_all_ranks()
        if agreement is not None:
            agreed = agreement.any(value if isinstance(value, list) else [value])
            return agreed if isinstance(value, list) else agreed[0]
        return super()._reduce_any(value)

    def _save_state(self) -> None:
        super()._save_state()
        token_bounds.save_statistics()
        self._generator_states = tuple((generator, generator.get_state()) for generator in _generators())

    def _restore_state(self) -> None:
        super()._restore_state()
        token_bounds.restore_statistics()
        for generator, state in self._generator_states:
            generator.set_state(state)


def _generators() -> list[torch.Generator]:
    """The generators of Megatron's RNG tracker; without those that CUDA graphs can use it has tensors."""
    from megatron.core.tensor_parallel import random

    states = random.get_all_rng_states() if random._CUDA_RNG_STATE_TRACKER_INITIALIZED else None
    return [state for state in (states or {}).values() if isinstance(state, torch.Generator)]
