"""Modes of torch and megatron-core in which passes without gradients may replay."""

import torch

from megatron.core.tensor_parallel.random import is_checkpointing


def may_replay_evaluation() -> bool:
    """Return whether a replay is allowed: not with grad, inference mode, autocast or activation checkpointing."""
    return not (
        torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cuda")
        or torch.is_autocast_enabled("cpu")
        or is_checkpointing()
    )
