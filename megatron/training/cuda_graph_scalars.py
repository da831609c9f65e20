"""Scalars on the use of CUDA graphs, for the TensorBoard and W&B writers of Megatron's training."""

import time
from collections import Counter
from typing import Any

from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

PREFIX = "cuda-graphs"
# Seconds between values, at least: on a busy host TensorBoard's writer took 0.2 ms for them and W&B's 1.3 ms, together
# less than a thousandth of that.
PAUSE = 2.0


class CudaGraphScalars:
    """Writes scalars on the graphs of a ``TECudaGraphHelper``, which calls it between steps.

    Every ``--tensorboard-log-interval`` iterations, ``PAUSE`` apart at least, and when graphs are deleted, as at the
    end of training, where this rank has writers:

    - ``cuda-graphs/replays``: how often forward graphs were replayed since the last values.
    - ``cuda-graphs/eager-steps/REASON``: how many steps since the last values ran eagerly, in whole or in part, by
      reason; each one from its first step on.
    - ``cuda-graphs/captures``: how often training has been captured.
    - ``cuda-graphs/memory-mib``: the memory pools of graphs.
    """

    def __init__(self) -> None:
        self._iteration: int | None = None  # the last one that was counted
        self._is_written = True  # so is it
        self._time_written = -PAUSE
        self._eager_steps: Counter[str] = Counter()
        self._replays = 0

    def __call__(self, helper: Any, deleting: bool = False) -> None:
        """Count the iteration that ended last, once however often this is called after it; write if it is time.

        Args:
            deleting: Whether its graphs are about to be deleted, so that what was not written is written now.
        """
        tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
        if tensorboard is None and wandb is None:
            return
        args = get_args()
        if not hasattr(args, "curr_iteration"):  # a loop other than Megatron's
            return
        if self._iteration is None:  # no iteration has ended; curr_iteration may be that of an earlier training
            self._iteration = max(getattr(args, "iteration", 0), args.curr_iteration)
            return
        is_due = False
        if args.curr_iteration + 1 > self._iteration:
            self._iteration, self._is_written = args.curr_iteration + 1, False
            reason = helper.eager_reason()
            if reason:
                self._eager_steps[reason] += 1
            waited = time.monotonic() >= self._time_written + PAUSE
            is_due = waited and self._iteration % args.tensorboard_log_interval == 0
        if is_due or (deleting and not self._is_written):
            self._is_written, self._time_written = True, time.monotonic()
            scalars = self._since_last_values(helper)
            if tensorboard is not None:
                for name, value in scalars.items():
                    tensorboard.add_scalar(name, value, self._iteration)
            if wandb is not None:
                wandb.log(scalars, self._iteration)

    def _since_last_values(self, helper: Any) -> dict[str, float]:
        use = helper.graph_use()
        scalars: dict[str, float] = {f"{PREFIX}/captures": use.captures}
        scalars[f"{PREFIX}/replays"] = use.replays - self._replays
        self._replays = use.replays
        if use.pool_bytes is not None:
            scalars[f"{PREFIX}/memory-mib"] = use.pool_bytes / 2**20
        for reason, steps in self._eager_steps.items():
            scalars[f"{PREFIX}/eager-steps/{reason}"] = steps
            self._eager_steps[reason] = 0
        return scalars
