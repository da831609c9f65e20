"""Extend ``RerunStateMachine`` to restore graph RNG states and to decide on reruns without synchronizing the GPU."""

from collections import abc
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from megatron.core.token_bounds import token_bounds
from megatron_fsdp_cuda_graphs.overlay import extend

from .host_agreement import agreement_of_all_ranks

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


class RerunStateMachine(_upstream.RerunStateMachine):
    """Extends megatron-core's ``RerunStateMachine`` in four ways.

    - Losses are checked for NaN, infinity and unexpectedly large values after all passes of the step have been
      launched. megatron-core synchronizes before each backward pass.
    - If possible, the hosts decide without the GPU (``agreement_of_all_ranks``). A collective would run after most of
      the step's work and leave the GPU idle before the optimizer step.
    - A rerun restores the states of the generators used by CUDA graphs. megatron-core saves references to the
      generators, whose states advance.
    - A step in which a rank's tokens exceeded the capacity (``token_bounds``) is rerun without this limit.
    """

    _generator_states: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()
    _agreed: bool | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._postponed: list[tuple[torch.cuda.Event, abc.Callable[[], None]]] = []
        token_bounds.clear()  # the model of an earlier training run may still exist on some ranks

    def should_run_forward_backward(self, data_iterator: Any) -> bool:
        """Return whether to run the step, the same on all ranks; see megatron-core."""
        self._validate_postponed()
        starts = self.state == _upstream.RerunState.NOT_RUNNING_YET
        bounded = bool(token_bounds) and self.mode == _upstream.RerunMode.VALIDATE_RESULTS
        runs = False
        if bounded and self.state == _upstream.RerunState.INITIAL_RUN:
            flags = [token_bounds.exceeded(), self.rerun_requested]
            exceeded, self._agreed = cast(tuple[bool, ...], self._reduce_any(flags))
            runs = token_bounds.needs_rerun(exceeded)
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

    def validate_result(self, result: Any, rejection_func: abc.Callable[[Any], Any], *args: Any, **kwargs: Any) -> None:
        """Validate a result; see megatron-core. If possible, validate a host copy later, after the step's passes."""
        validate = super().validate_result
        if args[1:] or kwargs.get("comparison_func") is not None or not self._can_postpone(result, rejection_func):
            self._validate_postponed()
            validate(result, rejection_func, *args, **kwargs)
            return
        copy, copied = result.detach().to("cpu", non_blocking=True), torch.cuda.Event()
        copied.record()
        self._postponed.append((copied, partial(validate, copy, rejection_func, *args, **kwargs)))

    def _can_postpone(self, result: Any, rejection_func: abc.Callable[[Any], Any]) -> bool:
        """Return whether ``result`` can be validated on a host copy after the passes of the step.

        Only rejection functions of megatron-core and torch are known to return the same answer for a host copy. During
        a rerun, or if reruns are disabled, results are validated immediately.
        """
        if self.mode != _upstream.RerunMode.VALIDATE_RESULTS or self.state != _upstream.RerunState.INITIAL_RUN:
            return False
        function = rejection_func.func if isinstance(rejection_func, partial) else rejection_func
        if function not in (torch.isnan, torch.isinf, self.is_unexpectedly_large):
            return False
        return isinstance(result, torch.Tensor) and result.is_cuda and not torch.cuda.is_current_stream_capturing()

    def _validate_postponed(self) -> None:
        postponed, self._postponed = self._postponed, []
        for copied, validate in postponed:
            copied.synchronize()
            validate()

    def _start_again(self, data_iterator: Any) -> None:
        """Restore the state before the step, rewind the data and lift token limits, so that the step can be rerun."""
        self._restore_state()
        for each in self._sanitize_data_iterators(data_iterator):
            each.rewind()
        self.validation_counts.clear()
        self.rerun_requested, self._agreed = False, None
        self.failed_validation_call = self.initial_result = None
        token_bounds.lift()

    def _reduce_any(self, value: bool | list[bool]) -> bool | tuple[bool, ...]:
        if self._agreed is not None:  # already reduced together with the overflow flag
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
    """Return the generators of Megatron's RNG tracker; an empty list if it stores tensors (without CUDA graphs)."""
    from megatron.core.tensor_parallel import random

    states = random.get_all_rng_states() if random._CUDA_RNG_STATE_TRACKER_INITIALIZED else None
    return [state for state in (states or {}).values() if isinstance(state, torch.Generator)]
