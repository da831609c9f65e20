"""Limit the tokens that ranks send each other (--moe-alltoall-capacity-factor), and rerun steps that exceed the limit.

``RerunStateMachine`` makes all ranks rerun such a step without the limit before the optimizer step: no token is
dropped. With CUDA graphs, the limit applies from the capture on, so that the router can balance its load first.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch


class TokenBounds:
    """Owns the token limits of all MoE layers in this process, and an overflow flag on the GPU for each step.

    ``copy_to_host`` starts copying the flag after the last forward pass, and ``overflowed`` waits only for that copy,
    so that the backward pass can run in the meantime.

    Attributes:
        in_force: Whether the limits apply now: in steps that can be rerun, and while their graphs are captured.
    """

    def __init__(self) -> None:
        self._routers: WeakSet[Any] = WeakSet()
        self._saved: dict[Any, torch.Tensor] = {}
        self._suspension: ExitStack | None = None  # while the limits are lifted
        self._steps = self._repeated = 0  # counted steps with limits, and reruns
        self.in_force = self._applies = self._begun = self._is_copied = False

    def __bool__(self) -> bool:
        return bool(self._routers)

    def add(self, router: torch.nn.Module) -> None:
        """Add the router of an MoE layer with a capacity factor."""
        if not self:
            self._too_small = torch.zeros(1, dtype=torch.bool, device=torch.cuda.current_device())
            self._on_host = torch.zeros(1, dtype=torch.bool, device="cpu").pin_memory()
            self._copied = torch.cuda.Event()
            self._applies = router.config.cuda_graph_impl == "none"
        self._routers.add(router)

    def clear(self) -> None:
        """Remove all routers."""
        self.end()
        self._routers.clear()
        self._saved, self._steps, self._repeated = {}, 0, 0

    def note(self, too_many: torch.Tensor) -> None:
        """Set the overflow flag on the GPU if any element of ``too_many`` (bool) is True."""
        self._too_small.logical_or_(too_many.any())

    def begin(self) -> None:
        """Begin the first run of a step."""
        self.end()  # the last step may have ended with an exception
        self.in_force, self._begun, self._is_copied = self._applies, True, False
        self._steps += self.in_force
        self._too_small.zero_()

    @contextmanager
    def of_captures(self) -> Iterator[None]:
        """Context manager for capturing training graphs: apply the limits within it and in later steps."""
        before, self.in_force, self._applies = self.in_force, True, True
        try:
            yield
        finally:
            self.in_force = before

    def copy_to_host(self) -> None:
        """Start copying the overflow flag to the host.

        Raises:
            RuntimeError: The training loop cannot rerun steps.
        """
        if not self or torch.cuda.is_current_stream_capturing():
            return
        if not self._begun:
            raise RuntimeError(
                "the training loop cannot rerun steps, as --moe-alltoall-capacity-factor requires: call "
                "RerunStateMachine.should_run_forward_backward before and after the passes, or remove the flag"
            )
        self._on_host.copy_(self._too_small, non_blocking=True)
        self._copied.record()
        self._is_copied = True

    def overflowed(self) -> bool:
        """Wait for the copy, and return whether this rank exceeded a limit."""
        if not self._is_copied:  # the schedule has its own ``backward_step``
            self.copy_to_host()
        self._copied.synchronize()
        return bool(self._on_host)

    def lift(self) -> str:
        """Lift the limits and suspend replays until ``end``; return a log message, often empty."""
        from megatron.core.transformer._cuda_graphs.snapshot import replays  # imports this module

        self.in_force, self._suspension = False, ExitStack()
        self._suspension.enter_context(replays.suspended("the step is rerun with room for all tokens"))
        self._too_small.zero_()
        self._on_host.zero_()
        self._repeated += 1
        if str(self._repeated).strip("0") != "1":
            return ""
        factor = max(router.config.moe_alltoall_capacity_factor for router in self._routers)
        return (
            "The step is rerun eagerly with room for all tokens: a rank sent another rank more tokens than "
            f"--moe-alltoall-capacity-factor {factor:g} allows. No token is dropped. {self._repeated} of {self._steps} "
            "steps have been rerun. If steps stay slow, raise the factor, or --cuda-graph-warmup-steps until loads "
            "are balanced. This message is logged after 1, 10, 100, ... reruns"
        )

    def end(self) -> None:
        """End the step, and resume replays."""
        self.in_force = self._begun = False
        if self._suspension is not None:
            self._suspension.close()
            self._suspension = None

    def save_statistics(self) -> None:
        """Save the statistics that routers and losses accumulate."""
        now = dict(self._statistics()) if self else {}
        if now.keys() != self._saved.keys():
            self._saved = {key: torch.empty_like(value) for key, value in now.items()}
        if now:
            torch._foreach_copy_(list(self._saved.values()), [now[key] for key in self._saved])

    def restore_statistics(self) -> None:
        """Restore the saved statistics in place, and zero statistics created since."""
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
