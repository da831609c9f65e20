"""Whether the current modes of torch and megatron-core allow replays in passes without gradients."""

import torch

from megatron.core.tensor_parallel.random import is_checkpointing


def may_replay_evaluation() -> bool:
    """Whether the current modes allow a replay: no grad, inference mode, autocast or activation checkpointing."""
    return not (
        torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cuda")
        or torch.is_autocast_enabled("cpu")
        or is_checkpointing()
    )
