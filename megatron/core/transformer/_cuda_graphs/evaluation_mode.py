"""Decide whether passes without gradients may replay graphs in the current modes of torch and megatron-core."""

import torch

from megatron.core.tensor_parallel.random import is_checkpointing


def may_replay_evaluation() -> bool:
    """Return whether grad, inference mode, autocast and activation checkpointing are all disabled."""
    return not (
        torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cuda")
        or torch.is_autocast_enabled("cpu")
        or is_checkpointing()
    )
