"""Multi-token prediction for whole-model graphs: static loss scales and metrics, and packed offsets on the GPU."""

from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


class MTPLossAutoScaler(_upstream.MTPLossAutoScaler):
    """Extends megatron-core's ``MTPLossAutoScaler`` to keep the scale in a static tensor, which replays read."""

    @staticmethod
    def set_loss_scale(scale: torch.Tensor) -> None:
        """Set the gradient scale of the MTP losses, in place on the GPU; ``scale`` has one element."""
        own = MTPLossAutoScaler.main_loss_backward_scale
        if own.is_cuda:
            own.copy_(scale.view(own.shape))
        else:
            MTPLossAutoScaler.main_loss_backward_scale = scale.clone()


class MTPLossLoggingHelper(_upstream.MTPLossLoggingHelper):
    """Extends megatron-core's ``MTPLossLoggingHelper`` to clear metrics in place: replays do not create them again."""

    @staticmethod
    def clean_metrics_in_tracker() -> None:
        """Zero the metrics in place; replays add to them."""
        for name in ("loss_values", "correct_values", "total_values"):
            if name in MTPLossLoggingHelper.tracker:
                MTPLossLoggingHelper.tracker[name].zero_()


def _roll_tensor_packed_seq(
    tensor: torch.Tensor, shifts: int, dims: int, packed_seq_params: Any, cp_group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shift the tokens of each packed sequence left by one without reading the offsets on the host.

    Args:
        tensor: ``[..., tokens]``.
        shifts: -1.
        dims: The last dimension.
        packed_seq_params: Contains the offsets ``cu_seqlens_q``, int32 ``[sequences + 1]``, on the device of
            ``tensor``.
        cp_group: The context-parallel group; each rank holds two chunks of each sequence.

    Returns:
        This rank's shifted tokens, with 0 at the end of each sequence, and their sum.

    Raises:
        AssertionError: ``shifts`` or ``dims`` is not supported.
    """
    assert dims in (-1, tensor.dim() - 1), f"dims must be the last dimension of a packed tensor, got {dims}"
    assert shifts == -1, f"shifts must be -1 with packed sequences, got {shifts}"
    if cp_group is not None and cp_group.size() > 1:
        places = _places_of_ranks(packed_seq_params.cu_seqlens_q.long(), tensor.shape[-1], cp_group.size())
        parts = [torch.empty_like(tensor) for _ in places]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=cp_group)
        gathered = torch.cat(parts, -1)
        whole = torch.empty_like(gathered).index_copy_(-1, places.flatten(), gathered)
        whole, _ = _roll_tensor_packed_seq(whole, shifts, dims, packed_seq_params)
        rolled = whole.index_select(-1, places[cp_group.rank()])
        return rolled, rolled.sum()
    offsets, tokens = packed_seq_params.cu_seqlens_q.long(), tensor.shape[-1]
    begins = torch.zeros(tokens + 1, dtype=torch.bool, device=tensor.device).scatter_(0, offsets, True)
    rolled = tensor.roll(-1, -1).masked_fill(begins[1:], 0)
    in_sequence = torch.arange(tokens, device=tensor.device) < offsets[-1]
    rolled = torch.where(in_sequence, rolled, tensor)
    return rolled, rolled.sum()


def _places_of_ranks(offsets: torch.Tensor, tokens: int, ranks: int) -> torch.Tensor:
    """Return the indices of each rank's tokens in the unsplit sequences, int64 ``[ranks, tokens]``.

    Args:
        offsets: The offsets of the unsplit sequences, int64 ``[sequences + 1]``.
        tokens: The number of tokens per rank.
        ranks: The number of context-parallel ranks; each holds one chunk from the front of a sequence and the mirrored
            chunk from its back.
    """
    offsets = torch.nn.functional.pad(offsets, (0, 1), value=ranks * tokens)  # unused tokens form one more sequence
    token = torch.arange(tokens, device=offsets.device)
    sequence = torch.searchsorted(offsets // ranks, token, right=True) - 1
    begin = offsets[sequence]
    length = (offsets[sequence + 1] - begin) // (2 * ranks)  # of one chunk
    within = token - begin // ranks
    rank = torch.arange(ranks, device=offsets.device).unsqueeze(1)
    piece = torch.where(within < length, rank, 2 * ranks - 1 - rank)
    return begin + piece * length + within % length
