"""packed_sequences: offsets as static inputs, and what graphs refuse; padding of ``PackedSeqParams``."""

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams, pad_packed_seq_params
from megatron.core.transformer._cuda_graphs.inputs import from_static_offsets, static_offsets, to_inputs

pytestmark = pytest.mark.usefixtures("cpu_backend")


def packed(*offsets, **changed):
    """Parameters of sequences that begin at ``offsets``, the last of which is the number of tokens."""
    starts = torch.tensor(offsets, dtype=torch.int32).cuda()
    fields = {"qkv_format": "thd", "cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 5}
    return PackedSeqParams(**fields | {"max_seqlen_kv": 5} | changed)


def test_missing_sequences_have_no_tokens_and_the_longest_may_have_all():
    params = packed(0, 3, 8, max_seqlen_kv=3)
    padded = pad_packed_seq_params(params, 4, 8)
    assert padded.cu_seqlens_q.tolist() == padded.cu_seqlens_kv.tolist() == [0, 3, 8, 8, 8]
    assert padded.cu_seqlens_q.dtype == torch.int32
    assert (padded.max_seqlen_q, padded.max_seqlen_kv, padded.pad_between_seqs) == (8, 8, False)
    assert padded.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == [0, 3, 8]


def test_as_many_sequences_as_there_may_be_stay_as_they_are():
    assert pad_packed_seq_params(packed(0, 3, 8), 2, 8).cu_seqlens_q.tolist() == [0, 3, 8]


def test_more_sequences_than_there_may_be_are_refused():
    with pytest.raises(ValueError, match="has 3 packed sequences, more than --cuda-graph-packed-sequences 2: set as"):
        pad_packed_seq_params(packed(0, 3, 5, 8), 2, 8)


@pytest.mark.parametrize("name", ["cu_seqlens_q_padded", "cu_seqlens_kv_padded"])
def test_room_between_sequences_is_refused(name):
    with pytest.raises(ValueError, match=r"room between them .* leave these out"):
        pad_packed_seq_params(packed(0, 3, 8, **{name: torch.tensor([0, 4, 8])}), 4, 8)


def test_a_layer_gets_at_capture_what_padded_parameters_have():
    given = from_static_offsets(static_offsets(4, 8) | {"rotary_pos_emb": None}, 8)
    assert given.keys() == {"rotary_pos_emb", "packed_seq_params"}
    at_capture, padded = given["packed_seq_params"], pad_packed_seq_params(packed(0, 8), 4, 8)
    for name, value in vars(padded).items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda one, other: one == other
        assert same(getattr(at_capture, name), value), name
    assert at_capture.cu_seqlens_q is not at_capture.cu_seqlens_kv
    assert at_capture.cu_seqlens_q.dtype == padded.cu_seqlens_q.dtype


def test_keywords_without_offsets_are_left_alone():
    kwargs = {"attention_mask": None}
    assert from_static_offsets(kwargs, 8) is kwargs


def test_graphs_that_read_offsets_get_them():
    params = pad_packed_seq_params(packed(0, 3, 8), 4, 8)
    kwargs = {"packed_seq_params": params, "attention_mask": None}
    inputs = to_inputs("layer 1", kwargs, "read", 8)
    assert inputs.keys() == {"attention_mask", "cu_seqlens_q", "cu_seqlens_kv"}
    assert inputs["cu_seqlens_q"] is params.cu_seqlens_q
    assert inputs["cu_seqlens_kv"] is params.cu_seqlens_kv
    assert kwargs.keys() == {"packed_seq_params", "attention_mask"}
    assert to_inputs("layer 1", kwargs, "unused", 8) == {"attention_mask": None}


@pytest.mark.parametrize("use", ["read", "unused"])
@pytest.mark.parametrize("kwargs", [{}, {"packed_seq_params": None}], ids=["missing", "None"])
def test_a_call_without_packed_sequences_is_refused(kwargs, use):
    with pytest.raises(ValueError, match=r"layer 1 was captured for packed sequences, and is given none\. With --cuda"):
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
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_parameters_that_were_not_padded_are_refused_with_the_remedy(changed):
    fields = {"max_seqlen_q": 8, "max_seqlen_kv": 8, "pad_between_seqs": False} | changed
    (name,) = changed
    with pytest.raises(ValueError, match=rf"layer 1 was captured .* with {name} .*pad_packed_seq_params\(params"):
        to_inputs("layer 1", {"packed_seq_params": packed(0, 3, 8, **fields)}, "read", 8)
