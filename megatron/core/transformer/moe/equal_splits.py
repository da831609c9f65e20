"""Arrange rows in equal-sized buffers, one per expert-parallel rank, with row counts on the GPU."""

import math
from typing import Any, NamedTuple

import torch


def capacity_of_peer(rows: int, top_k: int, experts: int, ranks: int, factor: float | None = None) -> int:
    """Return the maximum number of rows that a rank can send to each peer.

    Args:
        rows: The rank's tokens times ``top_k``.
        top_k: Experts per token.
        experts: Experts per rank.
        ranks: Number of expert-parallel ranks.
        factor: Capacity relative to an even share of ``rows``; None for the largest number that routing can produce.
    """
    most = rows // top_k * min(top_k, experts)
    return most if factor is None else min(most, math.ceil(rows / ranks * factor))


def cut(counts: torch.Tensor, capacity: int) -> torch.Tensor:
    """Clip the row counts ``[peers, groups]`` to ``capacity`` rows per peer, dropping rows of the last groups first."""
    return counts.cumsum(1).clamp(max=capacity).diff(dim=1, prepend=torch.zeros_like(counts[:, :1]))


class _Moved(torch.autograd.Function):
    """Computes ``rows[index]``. Its backward pass is also a gather, because a scatter would add atomically on a GPU."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class Places(NamedTuple):
    """Index mapping between rows in per-peer buffers and rows in one list; see ``places``.

    Attributes:
        in_list: List index of each buffer row, int64 ``[peers * capacity]``.
        in_buffers: Buffer index of each list row, int64 ``[rows]``.
    """

    in_list: torch.Tensor
    in_buffers: torch.Tensor

    def to_buffers(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy a list ``[rows, ...]`` to buffers ``[peers * capacity, ...]``; unused rows duplicate other rows."""
        return _Moved.apply(rows, self.in_list, self.in_buffers)

    def from_buffers(self, buffers: torch.Tensor) -> torch.Tensor:
        """Gather the used rows of ``buffers`` into a tensor ``[rows, ...]``. Gradients of unused rows are arbitrary."""
        return _Moved.apply(buffers, self.in_buffers, self.in_list)


def places(counts: torch.Tensor, capacity: int, rows: int) -> Places:
    """Map rows in per-peer buffers to rows in one list.

    A buffer contains its peer's groups in order, followed by unused rows. The list contains the first group of every
    peer, then the second group of every peer, and so on, followed by unused rows.

    Args:
        counts: Rows per group, integers ``[peers, groups]``.
        capacity: Rows per buffer, at least the sum of a peer's groups.
        rows: Rows of the list, at least the sum of all groups.
    """
    unused = capacity - counts.sum(1, keepdim=True)
    counts = torch.cat([counts, unused], 1)
    ends = counts.cumsum(1)
    ends_in_list = counts.t().flatten().cumsum(0).view_as(counts.t()).t()
    place = torch.arange(capacity, device=counts.device).expand(len(counts), -1).contiguous()
    group = torch.searchsorted(ends, place, right=True)
    in_list = (place + (ends_in_list - ends).gather(1, group)).flatten()
    # List rows that ``cut`` removed from the buffers duplicate other rows.
    in_buffers = in_list.new_zeros(max(len(in_list), rows))
    in_buffers.scatter_(0, in_list, torch.arange(len(in_list), device=counts.device))
    return Places(in_list.clamp(max=rows - 1), in_buffers[:rows])
