"""Rows in buffers of equal size, one for each expert parallel rank, with their numbers on the device."""

import math
from typing import Any, NamedTuple

import torch


def capacity_of_peer(rows: int, top_k: int, experts: int, ranks: int, factor: float | None = None) -> int:
    """Return how many rows a rank has room for to send to each rank.

    Args:
        rows: Its tokens x ``top_k``.
        top_k: To how many experts each token goes.
        experts: Experts of each rank.
        ranks: Ranks over which the experts are spread.
        factor: Room relative to an even share of ``rows``; None for the most that there can be.
    """
    most = rows // top_k * min(top_k, experts)
    return most if factor is None else min(most, math.ceil(rows / ranks * factor))


def cut(counts: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return how many rows of ``counts``, ``[peers, groups]``, fit a buffer, where the last do not."""
    return counts.cumsum(1).clamp(max=capacity).diff(dim=1, prepend=torch.zeros_like(counts[:, :1]))


class _Moved(torch.autograd.Function):
    """``rows[index]``, whose gradient is gathered as well: adding to ``rows`` would be atomic on a GPU."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class Places(NamedTuple):
    """Where the rows of buffers are in a list of them, and the reverse; see ``places``.

    Attributes:
        in_list: Place in the list of each row of the buffers, int64 ``[peers * capacity]``.
        in_buffers: Place in the buffers of each row of the list, int64 ``[rows]``.
    """

    in_list: torch.Tensor
    in_buffers: torch.Tensor

    def to_buffers(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the buffers ``[peers * capacity, ...]`` of the list ``[rows, ...]``; unused rows repeat others."""
        return _Moved.apply(rows, self.in_list, self.in_buffers)

    def from_buffers(self, buffers: torch.Tensor) -> torch.Tensor:
        """Return the list ``[rows, ...]`` of ``buffers``, whose unused rows get the gradients of others."""
        return _Moved.apply(buffers, self.in_buffers, self.in_list)


def places(counts: torch.Tensor, capacity: int, rows: int) -> Places:
    """Return where rows are in a buffer for each peer and in one list.

    A buffer has its groups of rows one after the other, unused rows last. The list has the first group of each peer,
    then the second of each, and so on.

    Args:
        counts: Integers ``[peers, groups]``: rows of each group.
        capacity: Rows of a buffer, at least those of a peer's groups together.
        rows: How many rows the list has, at least those of all groups. Unused rows take what is left, at its end.
    """
    unused = capacity - counts.sum(1, keepdim=True)
    counts = torch.cat([counts, unused], 1)
    ends = counts.cumsum(1)
    ends_in_list = counts.t().flatten().cumsum(0).view_as(counts.t()).t()
    place = torch.arange(capacity, device=counts.device).expand(len(counts), -1).contiguous()
    group = torch.searchsorted(ends, place, right=True)
    in_list = (place + (ends_in_list - ends).gather(1, group)).flatten()
    # Rows of the list that are in no buffer, as where ``cut`` left some out, repeat others.
    in_buffers = in_list.new_zeros(max(len(in_list), rows))
    in_buffers.scatter_(0, in_list, torch.arange(len(in_list), device=counts.device))
    return Places(in_list.clamp(max=rows - 1), in_buffers[:rows])
