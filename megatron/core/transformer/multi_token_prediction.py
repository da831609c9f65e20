"""Multi-token prediction that graphs of the whole model can hold: what they read and add to stays where it is."""

from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


class MTPLossAutoScaler(_upstream.MTPLossAutoScaler):
    """megatron-core's ``MTPLossAutoScaler``; its scale is one tensor, as of ``MoEAuxLossAutoScaler``."""

    @staticmethod
    def set_loss_scale(scale: torch.Tensor) -> None:
        """Set the scale of the losses' gradients, in place if it is on the GPU; ``scale`` has one element.

        Replays read it where it was at capture.
        """
        own = MTPLossAutoScaler.main_loss_backward_scale
        if own.is_cuda:
            own.copy_(scale.view(own.shape))
        else:
            MTPLossAutoScaler.main_loss_backward_scale = scale.clone()


class MTPLossLoggingHelper(_upstream.MTPLossLoggingHelper):
    """megatron-core's ``MTPLossLoggingHelper``; it keeps the groups that replays do not set again."""

    @staticmethod
    def clean_metrics_in_tracker() -> None:
        """Zero the metrics in place; replays add to them."""
        tracker = MTPLossLoggingHelper.tracker
        for name in ("loss_values", "correct_values", "total_values"):
            if name in tracker:
                tracker[name].zero_()


def _roll_tensor_packed_seq(
    tensor: torch.Tensor, shifts: int, dims: int, packed_seq_params: Any, cp_group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the tokens of each packed sequence to the left by one, by offsets that stay on the device.

    Args:
        tensor: ``[..., tokens]``.
        shifts: -1.
        dims: The last dimension.
        packed_seq_params: Has the offsets ``cu_seqlens_q``, int32 ``[sequences + 1]``, on the device of ``tensor``.
        cp_group: The context-parallel ranks; where there are several, the host reads the offsets.

    Returns:
        The moved tokens, with 0 at the end of each sequence, and their sum.
    """
    if (shifts, dims) != (-1, -1) or (cp_group is not None and cp_group.size() > 1):
        rolled: tuple[torch.Tensor, torch.Tensor] = _upstream._roll_tensor_packed_seq(
            tensor, shifts, dims, packed_seq_params, cp_group
        )
        return rolled
    offsets, tokens = packed_seq_params.cu_seqlens_q.long(), tensor.shape[-1]
    begins = torch.zeros(tokens + 1, dtype=torch.bool, device=tensor.device).scatter_(0, offsets, True)
    moved = tensor.roll(-1, -1).masked_fill(begins[1:], 0)
    in_sequence = torch.arange(tokens, device=tensor.device) < offsets[-1]
    moved = torch.where(in_sequence, moved, tensor)
    return moved, moved.sum()
