"""Limit the tokens that ranks send each other in CUDA graphs (--moe-alltoall-capacity-factor).

``RerunStateMachine`` makes all ranks rerun a step that exceeds the limit, eagerly and unlimited, before the optimizer
step: no token is dropped. Steps without graphs are not limited, and capture waits for a step within the limit.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch

from megatron.core._rank_utils import log_single_rank

logger = logging.getLogger(__name__)


class TokenBounds:
    """Decides whether token limits apply, and owns the overflow flag: whether this rank exceeded a limit in this step.

    ``copy_to_host`` starts copying the flag after the last forward pass, and ``exceeded`` waits only for that copy,
    so that the backward pass can run in the meantime.

    Attributes:
        in_force: Whether the limits apply now: during captures, and in steps with graphs, except their reruns.
        models: The model chunks that have graphs, even if the helper that captured them no longer exists.
    """

    def __init__(self) -> None:
        self._routers: WeakSet[Any] = WeakSet()
        self.models: WeakSet[torch.nn.Module] = WeakSet()
        self._saved: dict[Any, torch.Tensor] = {}
        self._suspension: ExitStack | None = None  # while the limits are lifted
        self._steps = self._repeated = self._waited = 0  # steps with limits, reruns, deferred captures
        self._load = 0.0
        self.in_force = self._exceeded = self._begun = self._is_copied = False

    def __bool__(self) -> bool:
        return bool(self._routers)

    def add(self, router: torch.nn.Module) -> None:
        """Add the router of an MoE layer with a capacity factor."""
        if not self:
            self._too_small = torch.zeros(1, dtype=torch.bool, device=torch.cuda.current_device())
            self._on_host = torch.zeros(1, dtype=torch.bool, device="cpu").pin_memory()
            self._copied = torch.cuda.Event()
            self._factor: float = router.config.moe_alltoall_capacity_factor
        self._routers.add(router)

    def clear(self) -> None:
        """Remove all routers and models."""
        self.end()
        self._routers.clear()
        self.models.clear()
        self._saved, self._exceeded = {}, False
        self._steps = self._repeated = self._waited = 0

    def note(self, too_many: torch.Tensor) -> None:
        """Set the overflow flag on the GPU if any element of ``too_many`` (bool) is True."""
        self._too_small.logical_or_(too_many.any())

    def note_load(self, load: float) -> None:
        """Record ``load``: the most tokens that one rank sent another, as a multiple of an even share."""
        if self._begun:
            self._load = max(self._load, load)

    def begin(self) -> None:
        """Begin a step: reset the overflow flag, and enforce the limits if graphs exist. Reruns do not call this."""
        self.end()  # the last step may have ended with an exception
        self.in_force = bool(self.models)
        self._begun, self._is_copied, self._load = True, False, 0.0
        self._steps += self.in_force
        self._too_small.zero_()

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

    def exceeded(self) -> bool:
        """Wait for the host copy of the overflow flag, and return it.

        Tokens beyond a limit set the flag even if the limits are not in force.
        """
        if not self._is_copied:  # the schedule has its own ``backward_step``
            self.copy_to_host()
        self._copied.synchronize()
        return bool(self._on_host)

    def needs_rerun(self, exceeded: bool) -> bool:
        """Return whether to rerun the step, given whether any rank ``exceeded`` a limit."""
        self._exceeded = exceeded
        return exceeded and self.in_force

    def defers_capture(self) -> bool:
        """Return whether capture must wait because the last step exceeded a limit. All ranks must call this.

        Log the load after 1, 10, 100, ... such steps.
        """
        if not self._exceeded:
            return False
        self._waited += 1
        if _is_logged(self._waited):
            load = torch.tensor(self._load, device="cuda")
            torch.distributed.all_reduce(load, torch.distributed.ReduceOp.MAX)
            text = (
                f"CUDA graphs are not captured yet: a rank sent another rank {load:.2f} times an even share of tokens. "
                f"Training is eager until a step stays within --moe-alltoall-capacity-factor {self._factor:g}: if this "
                "takes long, raise the factor. This message is logged after 1, 10, 100, ... such steps"
            )
            log_single_rank(logger, logging.WARNING, text)
        return True

    def lift(self) -> None:
        """Lift the limits and suspend replays until ``end``."""
        from megatron.core.transformer._cuda_graphs.snapshot import replays  # imports this module

        self.in_force, self._suspension = False, ExitStack()
        self._suspension.enter_context(replays.suspended("the step is rerun with room for all tokens"))
        self._repeated += 1
        if not _is_logged(self._repeated):
            return
        text = (
            "The step is rerun eagerly with room for all tokens: a rank sent another rank more tokens than "
            f"--moe-alltoall-capacity-factor {self._factor:g} allows. No token is dropped. {self._repeated} of "
            f"{self._steps} steps have been rerun. If steps stay slow, raise the factor. This message is logged after "
            "1, 10, 100, ... reruns"
        )
        log_single_rank(logger, logging.WARNING, text)

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


def _is_logged(number: int) -> bool:
    return str(number).strip("0") == "1"


token_bounds = TokenBounds()
