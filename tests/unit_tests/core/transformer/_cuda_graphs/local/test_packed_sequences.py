"""Test local graphs with packed sequences (``PackedSeqParams``), including padding between sequences."""

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.cuda_graphs import create_cudagraphs

from .local_graph_cases import HIDDEN, Layer, Stack, runners, use_graphable_rng

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")

TOKENS = 12


def packed(lengths, slots, **changes):
    """Return ``PackedSeqParams`` of sequences with ``lengths``, each padded to its length in ``slots``."""
    real, padded = (torch.tensor([0, *each], dtype=torch.int32).cumsum(0).int().cuda() for each in (lengths, slots))
    options = {
        "qkv_format": "thd",
        "cu_seqlens_q": real,
        "cu_seqlens_kv": real,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        "max_seqlen_q": TOKENS,
        "max_seqlen_kv": TOKENS,
        "pad_between_seqs": True,
    }
    return PackedSeqParams(**options | changes)


class Attention(Layer):
    """Attention within each sequence, excluding padding."""

    def forward(self, hidden_states, *args, packed_seq_params=None, **kwargs):
        self.calls.count += 1
        tokens = torch.arange(TOKENS, device=torch.device("cuda"))
        starts = packed_seq_params.cu_seqlens_q_padded
        lengths = packed_seq_params.cu_seqlens_q.diff()
        # In warm-up, lengths are zero, as in megatron-core.
        sequence = (torch.searchsorted(starts, tokens, right=True) - 1).clamp(max=len(lengths) - 1)
        is_real = tokens - starts[sequence] < lengths[sequence]
        sees = (sequence[:, None] == sequence) & is_real
        if packed_seq_params.seq_idx is not None:
            sees = sees & (packed_seq_params.seq_idx[0][:, None] == packed_seq_params.seq_idx[0])
        scores = (hidden_states @ hidden_states.t()).masked_fill(~sees, -1e9)
        return hidden_states + self.linear(scores.softmax(-1) @ hidden_states), None


def run(graphs, steps, pipeline=1):
    """Train one step for each list of micro-batches in ``steps``; return losses and gradients, and the model."""
    torch.manual_seed(5)
    use_graphable_rng()
    model, found = Stack([Attention(i + 1, graphs, pipeline) for i in range(2)]).cuda(), []
    for number, microbatches in enumerate(steps):
        losses = []
        for i, params in enumerate(microbatches):
            generator = torch.Generator().manual_seed(10 * number + i)
            x = torch.randn(TOKENS, HIDDEN, generator=generator).cuda()
            losses.append(model(x, packed_seq_params=params).square().mean())
            if pipeline == 1:
                losses[-1].backward()
        for loss in losses:
            if pipeline > 1:
                loss.backward()
            found.append(loss.item())
        create_cudagraphs()
        found += [param.grad.tolist() for param in model.parameters()]
        model.zero_grad()
    return found, model


STEPS = [
    [((3, 4, 1), (4, 4, 4))],
    [((2, 2, 2), (2, 4, 6))],
    [((6, 1, 2), (8, 2, 2))],
    [((3, 4, 1), (4, 4, 4))],
]


@pytest.mark.parametrize(
    ("pipeline", "microbatches", "options"),
    [(1, 2, {}), (2, 2, {"total_tokens": TOKENS})],
    ids=["one stage", "pipeline with seq_idx"],
)
def test_other_lengths_equal_eager(pipeline, microbatches, options):
    def steps():
        return [
            [packed(*STEPS[(number + i) % len(STEPS)][0], **options) for i in range(microbatches)]
            for number in range(len(STEPS))
        ]

    eager, _ = run(False, steps())
    graphed, model = run(True, steps(), pipeline)
    if pipeline == 1:
        assert graphed == eager
    else:  # different summation order: gradients of micro-batches are added after all forward passes
        assert graphed == run(False, steps(), pipeline)[0]
    assert len(runners(model)) == 2 * (microbatches if pipeline > 1 else 1)
