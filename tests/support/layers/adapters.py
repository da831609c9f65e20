"""Add low-rank adapters (LoRA) to the linear layers of a model."""

from typing import Any

import torch

NAMES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class AdaptedLinear(torch.nn.Module):
    """Adds the output of a low-rank adapter to the output of a linear layer.

    Args:
        linear: The layer; returns its output and a bias, as Megatron's linear layers do.
        rank: Rank of the adapter.
    """

    def __init__(self, linear: torch.nn.Module, rank: int):
        super().__init__()
        outputs, inputs = linear.weight.shape
        like: dict[str, Any] = {"bias": False, "dtype": linear.weight.dtype, "device": linear.weight.device}
        self.to_wrap = linear
        self.linear_in = torch.nn.Linear(inputs, rank, **like)
        self.linear_out = torch.nn.Linear(rank, outputs, **like)

    def forward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = self.to_wrap(tensor, *args, **kwargs)
        return output + self.linear_out(self.linear_in(tensor)), bias


def add_adapters(model: torch.nn.Module, rank: int) -> None:
    """Add adapters of ``rank`` to attention and MLP of each layer and freeze all other parameters."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in NAMES:
                setattr(module, name, AdaptedLinear(child, rank))
