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
        cp_group: The context-parallel ranks, each of which has two pieces of each sequence.

    Returns:
        The moved tokens, with 0 at the end of each sequence, and the sum of those of this rank.
    """
    if (shifts, dims) != (-1, -1):
        return _upstream._roll_tensor_packed_seq(tensor, shifts, dims, packed_seq_params, cp_group)
    offsets, tokens = packed_seq_params.cu_seqlens_q.long(), tensor.shape[-1]
    if cp_group is not None and cp_group.size() > 1:
        moved = _roll_over_ranks(tensor, offsets, cp_group)
        return moved, moved.sum()
    begins = torch.zeros(tokens + 1, dtype=torch.bool, device=tensor.device).scatter_(0, offsets, True)
    moved = tensor.roll(-1, -1).masked_fill(begins[1:], 0)
    in_sequence = torch.arange(tokens, device=tensor.device) < offsets[-1]
    moved = torch.where(in_sequence, moved, tensor)
    return moved, moved.sum()


def _roll_over_ranks(tensor: torch.Tensor, offsets: torch.Tensor, group: Any) -> torch.Tensor:
    """Move packed tokens, of which each rank of ``group`` has a piece from the front and one from the back.

    Args:
        tensor: ``[..., tokens of this rank]``.
        offsets: int64 ``[sequences + 1]``, of whole sequences.
        group: The ranks.
    """
    ranks, rank, tokens = group.size(), group.rank(), tensor.shape[-1]
    parts = [torch.empty_like(tensor) for _ in range(ranks)]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
    begins = offsets // ranks
    token = torch.arange(tokens, device=tensor.device)
    sequence = (torch.searchsorted(begins, token, right=True) - 1).clamp(max=len(begins) - 2)
    begin = begins[sequence]
    length = ((begins[sequence + 1] - begin) // 2).clamp(min=1)  # of a piece
    in_back = token - begin >= length
    piece = torch.where(in_back, 2 * ranks - 1 - rank, rank)
    following = piece * length + (token - begin) % length + 1  # within the sequence
    piece = following // length
    owner = torch.where(piece < ranks, piece, 2 * ranks - 1 - piece).clamp(min=0)
    place = owner * tokens + begin + (piece >= ranks) * length + following % length
    moved = torch.cat(parts, -1).index_select(-1, place.clamp(max=ranks * tokens - 1))
    moved = moved.masked_fill(piece == 2 * ranks, 0)
    return torch.where(token < begins[-1], moved, tensor)
