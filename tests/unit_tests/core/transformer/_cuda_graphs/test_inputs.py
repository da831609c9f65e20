"""Test packed sequences: offsets as static inputs, rejected formats, and padding of ``PackedSeqParams``."""

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams, pad_packed_seq_params
from megatron.core.transformer._cuda_graphs.inputs import from_static_offsets, static_offsets, to_inputs

pytestmark = pytest.mark.usefixtures("cpu_backend")


def packed(*offsets, **changed):
    """Return ``PackedSeqParams`` with these ``offsets``."""
    starts = torch.tensor(offsets, dtype=torch.int32).cuda()
    fields = {"qkv_format": "thd", "cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 5}
    return PackedSeqParams(**fields | {"max_seqlen_kv": 5} | changed)


def test_padding_adds_empty_sequences():
    params = packed(0, 3, 8, max_seqlen_kv=3)
    padded = pad_packed_seq_params(params, 4, 8)
    assert padded.cu_seqlens_q.tolist() == padded.cu_seqlens_kv.tolist() == [0, 3, 8, 8, 8]
    assert padded.cu_seqlens_q.dtype == torch.int32
    assert (padded.max_seqlen_q, padded.max_seqlen_kv, padded.pad_between_seqs) == (8, 8, False)
    assert padded.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == [0, 3, 8]


def test_maximum_number_of_sequences_is_unchanged():
    assert pad_packed_seq_params(packed(0, 3, 8), 2, 8).cu_seqlens_q.tolist() == [0, 3, 8]


def test_too_many_sequences_are_refused():
    with pytest.raises(ValueError, match="has 3 packed sequences, more than --cuda-graph-packed-sequences 2: raise"):
        pad_packed_seq_params(packed(0, 3, 5, 8), 2, 8)


@pytest.mark.parametrize("name", ["cu_seqlens_q_padded", "cu_seqlens_kv_padded"])
def test_padding_between_sequences_is_refused(name):
    with pytest.raises(ValueError, match="padding between them"):
        pad_packed_seq_params(packed(0, 3, 8, **{name: torch.tensor([0, 4, 8])}), 4, 8)


def test_captured_params_equal_padded_params():
    given = from_static_offsets(static_offsets(4, 8) | {"rotary_pos_emb": None}, 8)
    assert given.keys() == {"rotary_pos_emb", "packed_seq_params"}
    at_capture, padded = given["packed_seq_params"], pad_packed_seq_params(packed(0, 8), 4, 8)
    for name, value in vars(padded).items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda one, other: one == other
        assert same(getattr(at_capture, name), value), name
    assert at_capture.cu_seqlens_q is not at_capture.cu_seqlens_kv
    assert at_capture.cu_seqlens_q.dtype == padded.cu_seqlens_q.dtype


def test_keywords_without_offsets_are_unchanged():
    kwargs = {"attention_mask": None}
    assert from_static_offsets(kwargs, 8) is kwargs


def test_offsets_replace_params():
    params = pad_packed_seq_params(packed(0, 3, 8, tokens_per_sample=8), 4, 8)
    kwargs = {"packed_seq_params": params, "attention_mask": None}
    inputs = to_inputs("layer 1", kwargs, "read", 8)
    assert inputs.keys() == {"attention_mask", "cu_seqlens_q", "cu_seqlens_kv"}
    assert inputs["cu_seqlens_q"] is params.cu_seqlens_q
    assert inputs["cu_seqlens_kv"] is params.cu_seqlens_kv
    assert kwargs.keys() == {"packed_seq_params", "attention_mask"}
    assert to_inputs("layer 1", kwargs, "unused", 8) == {"attention_mask": None}


@pytest.mark.parametrize("use", ["read", "unused"])
@pytest.mark.parametrize("kwargs", [{}, {"packed_seq_params": None}], ids=["missing", "None"])
def test_missing_params_are_refused(kwargs, use):
    with pytest.raises(ValueError, match=r"layer 1 was captured for packed sequences, got none\. With --cuda"):
        to_inputs("layer 1", kwargs, use, 8)


@pytest.mark.parametrize(
    "changed",
    [
        {"qkv_format": "sbhd"},
        {"max_seqlen_q": 5},
        {"max_seqlen_kv": torch.tensor(8)},
        {"cu_seqlens_q_padded": torch.tensor([0, 4, 8])},
        {"cu_seqlens_kv_padded": torch.tensor([0, 4, 8])},
        {"pad_between_seqs": None},
        {"local_cp_size": 1},
        {"cp_group": object()},
        {"tokens_per_sample": 4},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_unpadded_params_are_refused(changed):
    fields = {"max_seqlen_q": 8, "max_seqlen_kv": 8, "pad_between_seqs": False} | changed
    (name,) = changed
    with pytest.raises(ValueError, match=rf"layer 1 was captured .* with {name} .*pad_packed_seq_params\(params"):
        to_inputs("layer 1", {"packed_seq_params": packed(0, 3, 8, **fields)}, "read", 8)
