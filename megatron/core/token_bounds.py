"""Bounds on the tokens that ranks send each other (--moe-alltoall-capacity-factor), and steps repeated without them.

If a rank has more tokens for another than there is room for, all ranks repeat the step with room for all.
``RerunStateMachine`` decides this before the optimizer's step: no token is dropped.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch


class TokenBounds:
    """The bounds of all MoE layers of this process, and a flag on the GPU: one was too small in the current step.

    ``copy_to_host`` starts to copy the flag after the last forward pass, and ``overflowed`` waits for the copy only:
    the backward pass runs meanwhile.

    Attributes:
        in_force: Whether tokens are bounded now: in a step that can be repeated, and in captures of its graphs.
    """

    def __init__(self) -> None:
        self._routers: WeakSet[Any] = WeakSet()
        self._saved: dict[Any, torch.Tensor] = {}
        self._suspension: ExitStack | None = None  # while bounds are lifted
        self.in_force = self._is_copied = self._warned = False

    def __bool__(self) -> bool:
        return bool(self._routers)

    def add(self, router: torch.nn.Module) -> None:
        """Add the router of an MoE layer with a capacity factor."""
        if not self:
            self._too_small = torch.zeros(1, dtype=torch.bool, device=torch.cuda.current_device())
            self._on_host = torch.zeros(1, dtype=torch.bool, device="cpu").pin_memory()
            self._copied = torch.cuda.Event()
        self._routers.add(router)

    def clear(self) -> None:
        """Remove all routers."""
        self.end()
        self._routers.clear()
        self._saved, self._warned = {}, False

    def note(self, too_many: torch.Tensor) -> None:
        """Set the flag on the GPU if any of ``too_many``, bool, is True."""
        self._too_small.logical_or_(too_many.any())

    def begin(self) -> None:
        """Begin the first run of a step."""
        self.end()  # an exception may have ended the last one
        self.in_force, self._is_copied = True, False
        self._too_small.zero_()

    @contextmanager
    def of_captures(self) -> Iterator[None]:
        """Bound tokens within this context, for captures of training."""
        before, self.in_force = self.in_force, True
        try:
            yield
        finally:
            self.in_force = before

    def copy_to_host(self) -> None:
        """Start to copy the flag to the host.

        Raises:
            RuntimeError: the training loop does not repeat steps.
        """
        if not self or torch.cuda.is_current_stream_capturing():
            return
        if not self.in_force and self._suspension is None:
            raise RuntimeError(
                "--moe-alltoall-capacity-factor requires a training loop that calls RerunStateMachine's "
                "should_run_forward_backward before and after the passes of a step: use Megatron's, or leave it out"
            )
        self._on_host.copy_(self._too_small, non_blocking=True)
        self._copied.record()
        self._is_copied = True

    def overflowed(self) -> bool:
        """Wait for the last copy, and return whether a bound of this rank was too small."""
        if not self._is_copied:  # a schedule with another ``backward_step``
            self.copy_to_host()
        self._copied.synchronize()
        return bool(self._on_host)

    def lift(self) -> str:
        """Lift the bounds and suspend replays until ``end``; return a log message, empty after the first time."""
        from megatron.core.transformer._cuda_graphs.snapshot import replays  # imports this module

        self.in_force, self._suspension = False, ExitStack()
        self._suspension.enter_context(replays.suspended("the step is repeated with room for all tokens"))
        self._too_small.zero_()
        self._on_host.zero_()
        if self._warned:
            return ""
        self._warned = True
        factor = max(router.config.moe_alltoall_capacity_factor for router in self._routers)
        return (
            "The step is repeated eagerly with room for all tokens: a rank had more for another than "
            f"--moe-alltoall-capacity-factor {factor:g} leaves room for. No token is dropped. If steps stay slow, "
            "raise the factor. This message is logged once"
        )

    def end(self) -> None:
        """End the step, and resume replays."""
        self.in_force = False
        if self._suspension is not None:
            self._suspension.close()
            self._suspension = None

    def save_statistics(self) -> None:
        """Copy the statistics that routers and losses accumulate."""
        now = dict(self._statistics()) if self else {}
        if now.keys() != self._saved.keys():
            self._saved = {key: torch.empty_like(value) for key, value in now.items()}
        if now:
            torch._foreach_copy_(list(self._saved.values()), [now[key] for key in self._saved])

    def restore_statistics(self) -> None:
        """Restore the statistics in place; new ones become zero."""
        for key, value in self._statistics() if self else ():
            if key in self._saved:
                value.copy_(self._saved[key])
            else:
                value.zero_()

    def _statistics(self) -> Iterator[tuple[Any, torch.Tensor]]:
        # These modules import this one.
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        for router in self._routers:
            for name, value in router.named_buffers():
                yield (id(router), name), value
        for name, entry in get_moe_metrics_tracker().metrics.items():
            yield name, entry.values
        for name, value in MTPLossLoggingHelper.tracker.items():
            if isinstance(value, torch.Tensor):
                yield ("mtp", name), value


token_bounds = TokenBounds()
