"""Write TensorBoard and W&B scalars on CUDA graph usage in Megatron's training loop."""

import time
from collections import Counter
from typing import Any

from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

PAUSE = 2.0  # minimum seconds between values: one call of W&B's writer can take 1.3 ms


class CudaGraphScalars:
    """Writes scalars on the graphs of a ``TECudaGraphHelper``, which calls it between steps.

    Ranks with writers log these scalars every ``--tensorboard-log-interval`` iterations, but at most every ``PAUSE``
    seconds, and when graphs are deleted:

    - ``cuda-graphs/replays``: replays of forward graphs since the previous value.
    - ``cuda-graphs/eager-steps/REASON``: steps that ran eagerly, fully or partly, since the previous value; a reason
      appears once it has occurred.
    - ``cuda-graphs/captures``: number of captures for training.
    - ``cuda-graphs/memory-mib``: size of the graphs' memory pools in MiB.
    """

    def __init__(self) -> None:
        self._iteration: int | None = None  # the last iteration counted
        self._is_written = True  # whether the scalars include it
        self._time_written = -PAUSE
        self._eager_steps: Counter[str] = Counter()
        self._replays = 0

    def __call__(self, helper: Any, deleting: bool = False) -> None:
        """Count the last iteration if it is new, and write the scalars if they are due.

        Args:
            helper: The ``TECudaGraphHelper`` to read counters from.
            deleting: Whether its graphs are about to be deleted; if so, write all values not written yet.
        """
        tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
        if tensorboard is None and wandb is None:
            return
        args = get_args()
        ended = getattr(args, "curr_iteration", -1) + 1  # Megatron's loop sets it in the first iteration
        if self._iteration is None:  # curr_iteration may belong to an earlier training run
            self._iteration = max(getattr(args, "iteration", 0), ended - 1)
            return
        is_due = False
        if ended > self._iteration:
            self._iteration, self._is_written = ended, False
            if reason := helper.eager_reason():
                self._eager_steps[reason] += 1
            waited = time.monotonic() >= self._time_written + PAUSE
            is_due = waited and ended % args.tensorboard_log_interval == 0
        if self._is_written or not (is_due or deleting):
            return
        self._is_written, self._time_written = True, time.monotonic()
        scalars = {f"cuda-graphs/{name}": value for name, value in self._since_last_values(helper).items()}
        if tensorboard is not None:
            for name, value in scalars.items():
                tensorboard.add_scalar(name, value, ended)
        if wandb is not None:
            wandb.log(scalars, ended)

    def _since_last_values(self, helper: Any) -> dict[str, float]:
        use = helper.graph_use()
        scalars: dict[str, float] = {"captures": use.captures, "replays": use.replays - self._replays}
        self._replays = use.replays
        if use.pool_bytes is not None:
            scalars["memory-mib"] = use.pool_bytes / 2**20
        for reason, steps in self._eager_steps.items():
            scalars[f"eager-steps/{reason}"] = steps
            self._eager_steps[reason] = 0
        return scalars
