"""Checkpoints that runs with and without graphs load alike.

Everything else in this module is megatron-core's.
"""

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import CheckpointException

from megatron.core.tensor_parallel import convert_cuda_rng_state
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def _load_base_checkpoint(
    load_dir: str | None, args: Any, rank0: bool = False, sharded_state_dict: Any = None, **others: Any
) -> Any:
    """Load a checkpoint into ``sharded_state_dict``; see megatron-core.

    Raises:
        ValueError: the checkpoint's random number generators are of another kind of device.
    """
    _expect_tensors(sharded_state_dict or {})
    try:
        return _upstream._load_base_checkpoint(load_dir, args, rank0, sharded_state_dict, **others)
    except CheckpointException as error:
        if "rng_state" not in str(error):
            raise
        raise ValueError(
            f"--load {load_dir}: the states of its random number generators do not fit those of this run, as between a "
            "GPU and the CPU backend. Add --no-load-rng; dropout then differs from the run that saved them."
        ) from error


def _expect_tensors(state_dict: dict[str, Any]) -> None:
    """Put tensors in the place of generators, whose states a tracker for graphs has and saves.

    What is read into a tensor may be either in a checkpoint; the tracker gets its own kind afterwards.
    """
    saved = state_dict.get("rng_state")
    by_rank = saved.values() if isinstance(saved, dict) else [saved]  # fsdp_dtensor, torch_dcp
    for states in (state for ranks in by_rank if isinstance(ranks, list) for state in ranks):
        tracked = states["rng_tracker_states"].items()
        states["rng_tracker_states"] = {name: convert_cuda_rng_state(state) for name, state in tracked}
