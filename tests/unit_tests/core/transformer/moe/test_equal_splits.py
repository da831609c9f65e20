"""Test the exchange of tokens in buffers of equal size: order, gradients and unused rows."""

import pytest

pytest.importorskip("megatron.core")

import torch

from megatron.core.transformer.moe.equal_splits import capacity_of_peer, cut, places
from megatron.core.transformer.moe.grouped_tensor import compute_experts
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute

from .test_grouped_tensor import EXPERTS, GATED, HIDDEN, config, leaves, parameters

TOKENS = 10
ROUNDING = 2e-6  # for sums in a different order, relative to the norm


class _Unwritten(torch.autograd.Function):
    """Sets the rows marked by ``unused``, and their gradients, to NaN."""

    @staticmethod
    def forward(ctx, rows, unused):
        ctx.unused = unused
        return rows.masked_fill(_as(unused, rows), torch.nan)

    @staticmethod
    def backward(ctx, grad):
        return grad.masked_fill(_as(ctx.unused, grad), torch.nan), None


def _as(mask, rows):
    return mask.view(-1, *[1] * (rows.dim() - 1))


def uneven(rank, top_k=2):
    """Return the routing map of ``rank``, with ``top_k`` random experts per token."""
    draws = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(rank))
    return torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, draws.topk(top_k).indices, True)


def only(*experts):
    return torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).index_fill_(1, torch.tensor(experts), True)


# Routing map of each rank's tokens
ROUTES = {
    "uneven": [uneven(0), uneven(1)],
    "all to all": [uneven(0, EXPERTS), uneven(1, EXPERTS)],
    "one expert": [only(2), only(2)],
    "none to the second rank": [only(0, 1), only(0, 1)],
    "empty experts": [only(1, 3), only(1, 2)],
}


@pytest.fixture(params=ROUTES)
def routes(request):
    return ROUTES[request.param]


class Ranks:
    """A group of ranks simulated in this process."""

    def __init__(self, maps):
        self.maps, self.size = maps, len(maps)
        self.experts, self.top_k = EXPERTS // self.size, int(maps[0][0].sum())
        # Source rank, destination rank, expert.
        self.counts = torch.stack([each.sum(0).view(self.size, self.experts) for each in maps])
        self.capacity = TOKENS * min(self.top_k, self.experts)
        self.sent = [places(each.sum(1, keepdim=True), self.capacity, TOKENS * self.top_k) for each in self.counts]
        rows = self.size * self.capacity
        self.received = [places(self.counts[:, rank], self.capacity, rows) for rank in range(self.size)]

    def exchange(self, buffers, to_experts):
        """Exchange ``buffers`` between all ranks; unused rows and their gradients become NaN."""
        parts = [each.view(self.size, self.capacity, *each.shape[1:]) for each in buffers]
        used = self.counts.sum(2) if to_experts else self.counts.sum(2).t()  # source rank, destination rank
        unused = torch.arange(self.capacity) >= used.unsqueeze(2)
        return [
            _Unwritten.apply(torch.cat([part[rank] for part in parts]), unused[:, rank].flatten())
            for rank in range(self.size)
        ]

    def dispatch(self, rows):
        """Return the rows that each rank's experts receive, given each rank's rows from ``permute``."""
        received = self.exchange([sent.to_buffers(each) for sent, each in zip(self.sent, rows, strict=True)], True)
        return [places.from_buffers(each) for places, each in zip(self.received, received, strict=True)]

    def combine(self, rows):
        """Reverse ``dispatch``."""
        back = [places.to_buffers(each) for places, each in zip(self.received, rows, strict=True)]
        return [sent.from_buffers(each) for sent, each in zip(self.sent, self.exchange(back, False), strict=True)]


def permuted(ranks, tokens, probs):
    """Return each rank's permuted rows and probabilities, and the indices that restore the token order."""
    rows = TOKENS * ranks.top_k
    found = [permute(*each, num_out_tokens=rows) for each in zip(tokens, ranks.maps, probs, strict=True)]
    return [each[0] for each in found], [each[1] for each in found], [each[2] for each in found]


def test_rows_are_in_the_order_of_megatron_core(routes):
    ranks = Ranks(routes)
    tokens = leaves(*[(TOKENS, HIDDEN)] * ranks.size)
    probs = leaves(*[(TOKENS, EXPERTS)] * ranks.size, seed=1)
    rows, scales, _ = permuted(ranks, tokens, probs)
    by_expert = torch.arange(EXPERTS).view(ranks.size, ranks.experts).t().flatten()
    for rank, (mine, of_mine) in enumerate(zip(ranks.dispatch(rows), ranks.dispatch(scales), strict=True)):
        split = [each.split(ranks.counts[source].sum(1).tolist()) for source, each in enumerate(rows)]
        split_scales = [each.split(ranks.counts[source].sum(1).tolist()) for source, each in enumerate(scales)]
        expected, of_expected = sort_chunks_by_idxs(
            torch.cat([each[rank] for each in split]),
            ranks.counts[:, rank].flatten(),
            by_expert,
            probs=torch.cat([each[rank] for each in split_scales]),
        )
        assert len(mine) == ranks.size * ranks.capacity
        assert torch.equal(mine[: len(expected)], expected)
        assert torch.equal(of_mine[: len(expected)], of_expected)


def test_combine_inverts_dispatch_and_its_gradients(routes):
    ranks = Ranks(routes)
    rows = leaves(*[(TOKENS * ranks.top_k, HIDDEN)] * ranks.size)
    back = ranks.combine(ranks.dispatch(rows))
    assert all(map(torch.equal, back, rows))
    grads = [torch.randn_like(each) for each in back]
    assert all(map(torch.equal, torch.autograd.grad(back, rows, grads), grads))


def test_experts_of_several_ranks_compute_as_on_one(routes):
    ranks = Ranks(routes)
    tokens = leaves(*[(TOKENS, HIDDEN)] * ranks.size)
    probs = leaves(*[(TOKENS, EXPERTS)] * ranks.size, seed=1)
    fc1, fc2 = parameters(gated=True, bias=True, dtype=torch.float32)
    leaves_of = [*tokens, *probs, *fc1.weights, *fc1.biases, *fc2.weights, *fc2.biases]
    grads = [each.detach() for each in leaves(*[(TOKENS, HIDDEN)] * ranks.size, seed=2)]

    def own(layers, rank):
        mine = slice(rank * ranks.experts, (rank + 1) * ranks.experts)
        return type(layers)(*(kind[mine] for kind in layers))

    rows, scales, orders = permuted(ranks, tokens, probs)
    options = config(**GATED, expert_model_parallel_size=ranks.size)
    outputs = []
    for rank, (mine, scale) in enumerate(zip(ranks.dispatch(rows), ranks.dispatch(scales), strict=True)):
        counts = ranks.counts[:, rank].sum(0)
        layers = own(fc1, rank), own(fc2, rank)
        outputs.append(compute_experts(options, options.activation_func, *layers, mine, counts, scale)[0])
    found = [
        unpermute(each, order, torch.Size((TOKENS, HIDDEN)))
        for each, order in zip(ranks.combine(outputs), orders, strict=True)
    ]
    found_grads = torch.autograd.grad(found, leaves_of, grads)

    everything = torch.cat(ranks.maps)
    all_rows, all_scales, order, _, _ = permute(
        torch.cat(tokens), everything, torch.cat(probs), num_out_tokens=int(everything.sum())
    )
    alone = config(**GATED)
    output, _ = compute_experts(alone, alone.activation_func, fc1, fc2, all_rows, everything.sum(0), all_scales)
    expected = unpermute(output, order, torch.Size((len(everything), HIDDEN)))
    expected_grads = torch.autograd.grad(expected, leaves_of, torch.cat(grads))
    assert (torch.cat(found) - expected).norm() <= ROUNDING * expected.norm()
    for mine, theirs in zip(found_grads, expected_grads, strict=True):
        assert (mine - theirs).norm() <= ROUNDING * theirs.norm()


@pytest.mark.parametrize(
    ("factor", "rows"), [(None, 20), (1.0, 5), (1.3, 7), (0.1, 1), (4.0, 20), (100.0, 20)], ids=lambda value: str(value)
)
def test_capacity_is_a_share_of_tokens_up_to_the_maximum(factor, rows):
    assert capacity_of_peer(TOKENS * 2, top_k=2, experts=2, ranks=4, factor=factor) == rows
    assert capacity_of_peer(TOKENS * 2, top_k=2, experts=1, ranks=4, factor=factor) == min(rows, TOKENS)


def test_least_sufficient_capacity_changes_no_row(routes):
    ranks, least = Ranks(routes), Ranks(routes)
    least.capacity = int(ranks.counts.sum(2).max())
    least.sent = [
        places(cut(each.sum(1, keepdim=True), least.capacity), least.capacity, TOKENS * ranks.top_k)
        for each in ranks.counts
    ]
    least.received = [
        places(cut(ranks.counts[:, rank], least.capacity), least.capacity, ranks.size * least.capacity)
        for rank in range(ranks.size)
    ]
    rows = leaves(*[(TOKENS * ranks.top_k, HIDDEN)] * ranks.size)
    for rank, (mine, theirs) in enumerate(zip(least.dispatch(rows), ranks.dispatch(rows), strict=True)):
        used = int(ranks.counts[:, rank].sum())
        assert torch.equal(mine[:used], theirs[:used])
    assert all(map(torch.equal, least.combine(least.dispatch(rows)), rows))
