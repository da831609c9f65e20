"""Rows in buffers of equal size, one for each expert-parallel rank, with row counts on the GPU."""

import math
from typing import Any, NamedTuple

import torch


def capacity_of_peer(rows: int, top_k: int, experts: int, ranks: int, factor: float | None = None) -> int:
    """Return the number of rows that a rank can send to each rank.

    Args:
        rows: Tokens of the rank times ``top_k``.
        top_k: Experts per token.
        experts: Experts per rank.
        ranks: Expert-parallel ranks.
        factor: The capacity relative to an even share of ``rows``; None for the largest possible number.
    """
    most = rows // top_k * min(top_k, experts)
    return most if factor is None else min(most, math.ceil(rows / ranks * factor))


def cut(counts: torch.Tensor, capacity: int) -> torch.Tensor:
    """Clip the row counts ``[peers, groups]`` to the capacity of each peer's buffer, last groups first."""
    return counts.cumsum(1).clamp(max=capacity).diff(dim=1, prepend=torch.zeros_like(counts[:, :1]))


class _Moved(torch.autograd.Function):
    """``rows[index]`` with a gathered gradient: scattering would add atomically on a GPU."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class Places(NamedTuple):
    """Indices that map the rows of buffers to a list, and back; see ``places``.

    Attributes:
        in_list: Index in the list of each row of the buffers, int64 ``[peers * capacity]``.
        in_buffers: Index in the buffers of each row of the list, int64 ``[rows]``.
    """

    in_list: torch.Tensor
    in_buffers: torch.Tensor

    def to_buffers(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the buffers ``[peers * capacity, ...]`` for a list ``[rows, ...]``; unused rows repeat others."""
        return _Moved.apply(rows, self.in_list, self.in_buffers)

    def from_buffers(self, buffers: torch.Tensor) -> torch.Tensor:
        """Return the list ``[rows, ...]`` for ``buffers``; their unused rows get the gradients of others."""
        return _Moved.apply(buffers, self.in_buffers, self.in_list)


def places(counts: torch.Tensor, capacity: int, rows: int) -> Places:
    """Map rows in one buffer per peer to rows in one list.

    A buffer holds the groups of its peer in order, then unused rows. The list holds the first group of each peer, then
    the second of each, and so on, and unused rows at its end.

    Args:
        counts: Rows of each group, integers ``[peers, groups]``.
        capacity: Rows of a buffer, at least the sum of a peer's groups.
        rows: Rows of the list, at least the sum of all groups.
    """
    unused = capacity - counts.sum(1, keepdim=True)
    counts = torch.cat([counts, unused], 1)
    ends = counts.cumsum(1)
    ends_in_list = counts.t().flatten().cumsum(0).view_as(counts.t()).t()
    place = torch.arange(capacity, device=counts.device).expand(len(counts), -1).contiguous()
    group = torch.searchsorted(ends, place, right=True)
    in_list = (place + (ends_in_list - ends).gather(1, group)).flatten()
    # Rows of the list that are in no buffer, after ``cut``, repeat others.
    in_buffers = in_list.new_zeros(max(len(in_list), rows))
    in_buffers.scatter_(0, in_list, torch.arange(len(in_list), device=counts.device))
    return Places(in_list.clamp(max=rows - 1), in_buffers[:rows])
