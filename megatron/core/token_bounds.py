"""Bounds on the tokens that ranks send each other (--moe-alltoall-capacity-factor), and steps that run again without.

A step in which some rank has more tokens for another than there is room for is run again, on all ranks, with room for
all. ``RerunStateMachine`` decides so before the optimizer's step: nothing is ever dropped.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch


class TokenBounds:
    """The bounds of all MoE layers of this process, and whether one was too small in the step that runs.

    The device knows. ``copy_to_host`` puts it on its way after the last forward pass, and ``overflowed`` waits for no
    more than that: the backward pass goes on meanwhile.

    Attributes:
        in_force: Whether tokens are bounded now: in a step that can run again, and in captures of its graphs.
    """

    def __init__(self) -> None:
        self._routers: WeakSet[Any] = WeakSet()
        self._kept: dict[Any, torch.Tensor] = {}
        self._suspension: ExitStack | None = None  # while bounds are lifted
        self.in_force = self._is_copied = self._told = False

    def __bool__(self) -> bool:
        return bool(self._routers)

    def add(self, router: torch.nn.Module) -> None:
        """Add an MoE layer's router, whose configuration has a factor."""
        if not self:
            self._too_small = torch.zeros(1, dtype=torch.bool, device=torch.cuda.current_device())
            self._on_host = torch.zeros(1, dtype=torch.bool, device="cpu").pin_memory()
            self._copied = torch.cuda.Event()
        self._routers.add(router)

    def clear(self) -> None:
        """Forget all routers."""
        self.end()
        self._routers.clear()
        self._kept, self._told = {}, False

    def note(self, too_many: torch.Tensor) -> None:
        """Note on the device whether any of ``too_many``, bool, is True."""
        self._too_small.logical_or_(too_many.any())

    def begin(self) -> None:
        """Begin the first run of a step."""
        self.end()  # of one that an exception has ended
        self.in_force, self._is_copied = True, False
        self._too_small.zero_()

    @contextmanager
    def of_captures(self) -> Iterator[None]:
        """The context of captures for training."""
        before, self.in_force = self.in_force, True
        try:
            yield
        finally:
            self.in_force = before

    def copy_to_host(self) -> None:
        """Begin to copy what forward passes have noted so far.

        Raises:
            RuntimeError: nobody has begun a step, or would run it again.
        """
        if not self or torch.cuda.is_current_stream_capturing():
            return
        if not self.in_force and self._suspension is None:
            raise RuntimeError(
                "--moe-alltoall-capacity-factor needs a training loop that asks RerunStateMachine's "
                "should_run_forward_backward before and after the passes of a step, as Megatron's does"
            )
        self._on_host.copy_(self._too_small, non_blocking=True)
        self._copied.record()
        self._is_copied = True

    def overflowed(self) -> bool:
        """Wait for the last copy; return whether any bound of this rank was too small."""
        if not self._is_copied:  # a schedule with another ``backward_step``
            self.copy_to_host()
        self._copied.synchronize()
        return bool(self._on_host)

    def lift(self) -> str:
        """Give all tokens room, and run eagerly, until ``end``. Return a log message; empty if it was logged before."""
        from megatron.core.transformer._cuda_graphs.snapshot import replays  # imports this module

        self.in_force, self._suspension = False, ExitStack()
        self._suspension.enter_context(replays.suspended("the step runs again with room for all tokens"))
        self._too_small.zero_()
        self._on_host.zero_()
        if self._told:
            return ""
        self._told = True
        factor = max(router.config.moe_alltoall_capacity_factor for router in self._routers)
        return (
            "The step runs again, eagerly and with room for all tokens: a rank had more for another one than "
            f"--moe-alltoall-capacity-factor {factor:g} leaves room for. Nothing is dropped. If it happens "
            "often, which costs time, raise the factor. This is said once"
        )

    def end(self) -> None:
        """End the step: bounds are what they were."""
        self.in_force = False
        if self._suspension is not None:
            self._suspension.close()
            self._suspension = None

    def save_statistics(self) -> None:
        """Keep what routers and losses add up, as it is now."""
        now = dict(self._statistics()) if self else {}
        if now.keys() != self._kept.keys():
            self._kept = {key: torch.empty_like(value) for key, value in now.items()}
        if now:
            torch._foreach_copy_(list(self._kept.values()), [now[key] for key in self._kept])

    def restore_statistics(self) -> None:
        """Let it be, in place, what it was when it was kept; what is new is zero."""
        for key, value in self._statistics() if self else ():
            if key in self._kept:
                value.copy_(self._kept[key])
            else:
                value.zero_()

    def _statistics(self) -> Iterator[tuple[Any, torch.Tensor]]:
        # They import modules that import this one.
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
