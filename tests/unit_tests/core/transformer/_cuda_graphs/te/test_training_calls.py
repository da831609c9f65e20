"""Test that TrainingCalls detects whether graphs match the calls of training."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer._cuda_graphs.te.training_calls import TrainingCalls


class Model(torch.nn.Module):
    def forward(self, input_ids, position_ids, attention_mask, labels=None, *, packed_seq_params=None, loss_mask=None):
        return input_ids


TOKENS = torch.zeros(2, 4, dtype=torch.int64)
MASK = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
FITTING = (TOKENS, TOKENS, None, TOKENS)


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def calls(model):
    return TrainingCalls([model])


def test_calls_with_and_without_labels_match_graphs(model, calls):
    model(*FITTING, loss_mask=TOKENS)
    model(*FITTING[:3])
    model(TOKENS, position_ids=TOKENS, attention_mask=MASK, labels=TOKENS, packed_seq_params=None)
    assert calls.blocker == ""


def test_no_call_is_a_blocker(calls):
    assert calls.blocker == "the model has not been called for training yet"


def test_optional_arguments_of_calls_are_noted(model, calls):
    assert calls.given == {"attention_mask", "labels"}  # not called so far
    model(*FITTING[:3])
    assert calls.given == set()
    model(*FITTING)
    assert calls.given == {"labels"}
    model(TOKENS, TOKENS, MASK)
    assert calls.given == {"attention_mask", "labels"}


@pytest.mark.parametrize("unfit_is_first", [True, False])
@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((None, TOKENS, None, TOKENS), {}, "the model was called without tokens"),
        (FITTING, {"packed_seq_params": object()}, "the model was called with packed_seq_params"),
        (
            (TOKENS, None, None, TOKENS),
            {},
            "the model's position_ids must have shape [2, 4] and dtype torch.int64, got None",
        ),
        (
            (TOKENS, TOKENS[:1], None, TOKENS),
            {},
            "the model's position_ids must have shape [2, 4] and dtype torch.int64, got [1, 4] torch.int64",
        ),
        (
            (TOKENS, TOKENS, None, TOKENS.int()),
            {},
            "the model's labels must have shape [2, 4] and dtype torch.int64, got [2, 4] torch.int32",
        ),
        (
            (TOKENS, TOKENS, MASK[:1], TOKENS),
            {},
            "the model's attention_mask must have shape [2, 1, 4, 4] and dtype torch.bool, got [1, 1, 4, 4] torch.bool",
        ),
    ],
)
def test_one_mismatched_call_is_a_blocker(model, calls, args, kwargs, reason, unfit_is_first):
    if not unfit_is_first:
        model(*FITTING)
    model(*args, **kwargs)
    if unfit_is_first:
        model(*FITTING)
    assert calls.blocker == reason


PREDICTING = "mtp"
SHARED = {"context_parallel_size": 2}
PACKING = {"cuda_graph_packed_sequences": 2, "context_parallel_size": 1}
NOT_PADDED = "the model's packed_seq_params are not padded by pad_packed_seq_params"
OFFSETS = torch.tensor([0, 3, 4], dtype=torch.int32)


def packed(**changed):
    fields = {"cu_seqlens_q": OFFSETS, "cu_seqlens_kv": OFFSETS, "max_seqlen_q": 4, "max_seqlen_kv": 4}
    return PackedSeqParams(**{"qkv_format": "thd", "pad_between_seqs": False} | fields | changed)


@pytest.mark.parametrize(
    ("positions", "options", "mask", "kwargs", "reason"),
    [
        ((2, 4), PREDICTING, None, {"loss_mask": torch.ones(2, 4)}, ""),
        (
            (2, 4),
            PREDICTING,
            None,
            {},
            "the model's loss_mask must have shape [2, 4] and dtype torch.float32, got None",
        ),
        (
            (2, 4),
            PREDICTING,
            None,
            {"loss_mask": TOKENS},
            "the model's loss_mask must have shape [2, 4] and dtype torch.float32, got [2, 4] torch.int64",
        ),
        ((2, 4), SHARED, torch.zeros(2, 1, 4, 8, dtype=torch.bool), {}, ""),
        (
            (2, 4),
            SHARED,
            MASK,
            {},
            "the model's attention_mask must have shape [2, 1, 4, 8] and dtype torch.bool, got [2, 1, 4, 4] torch.bool",
        ),
        ((2, 4), PACKING, None, {"packed_seq_params": packed()}, ""),
        (
            (2, 4),
            PACKING,
            None,
            {"packed_seq_params": packed(max_seqlen_q=3)},
            NOT_PADDED,
        ),
        (
            (2, 4),
            PACKING,
            None,
            {"packed_seq_params": packed(cu_seqlens_q=OFFSETS[:2])},
            "the model's cu_seqlens_q must have shape [3] and dtype torch.int32, got [2] torch.int32",
        ),
        ((2, 4), PACKING | SHARED, None, {"packed_seq_params": packed()}, NOT_PADDED),
        ((2, 4), PACKING | SHARED, None, {"packed_seq_params": packed(max_seqlen_q=8, max_seqlen_kv=8)}, ""),
        ((2, 4), PACKING, None, {}, NOT_PADDED),
        ((2, 4), PACKING, MASK, {"packed_seq_params": packed()}, "the model was called with attention_mask"),
        ((3, 2, 4), {}, None, {}, ""),
        (
            (2, 4),
            "mrope",
            None,
            {},
            "the model's position_ids must have shape [3, 2, 4] and dtype torch.int64, got [2, 4] torch.int64",
        ),
    ],
)
def test_expected_arguments_depend_on_the_model(model, calls, positions, options, mask, kwargs, reason):
    if len(positions) == 3 or options == "mrope":
        model.position_embedding_type = "mrope"
    if options == PREDICTING:
        model.mtp = torch.nn.Module()
    model.config = SimpleNamespace(**{} if isinstance(options, str) else options)
    model(TOKENS, torch.zeros(positions, dtype=torch.int64), mask, TOKENS, **kwargs)
    assert calls.blocker == reason


def test_stop_removes_hooks(model, calls):
    model(*FITTING)
    calls.stop()
    assert not model._forward_hooks
    model(None, *FITTING[1:])
    assert calls.blocker == ""


class Decoder(torch.nn.Module):
    def forward(self, hidden_states, extract_layer_indices=None):
        return hidden_states


class Scaled(torch.nn.Module):
    """A module that returns its scaled weight as a tensor, a tuple or a dict, depending on ``kind``."""

    kinds = {"tensor": lambda out: out, "tuple": lambda out: (None, out), "dict": lambda out: {"losses": [out]}}

    def __init__(self, kind="tensor"):
        super().__init__()
        self.weight, self._wrap = torch.nn.Parameter(torch.ones(3)), self.kinds[kind]

    def forward(self, scale):
        return self._wrap(scale * self.weight)


def loss(output):
    (tensor,) = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if leaf is not None]
    return tensor.sum()


@pytest.fixture(params=Scaled.kinds)
def scaled(request):
    return Scaled(request.param)


def test_alternating_passes_are_not_interleaved(scaled):
    passes = TrainingCalls([scaled])
    for _ in range(3):
        loss(scaled(2)).backward()
    assert not passes.interleaved


@pytest.mark.parametrize("together", [True, False])
def test_two_forward_passes_in_a_row_are_interleaved(scaled, together):
    passes = TrainingCalls([scaled])
    first, second = loss(scaled(2)), loss(scaled(3))
    if together:
        (first + second).backward()
    else:
        second.backward()
        first.backward()
    assert passes.interleaved


def test_evaluation_does_not_interleave_passes():
    model = Scaled()
    passes = TrainingCalls([model])
    first = loss(model(2))
    with torch.no_grad():
        model(3)
    model.eval()(3)
    first.backward()
    assert not passes.interleaved


class Chunk(Model):
    """A first, middle or last pipeline chunk."""

    def __init__(self, first, last, hidden_states=None):
        super().__init__()
        self.pre_process, self.post_process = first, last
        self.decoder = Decoder()
        self.decoder.input_tensor = hidden_states
        self.config = SimpleNamespace(sequence_parallel=True, tensor_model_parallel_size=2, context_parallel_size=1)


HIDDEN = torch.zeros(2, 2, 8)  # four tokens, sharded across two ranks by sequence parallelism
FIRST, BETWEEN, LAST = ((True, False), (False, False), (False, True))


@pytest.mark.parametrize(
    ("place", "args", "reason"),
    [
        (FIRST, (TOKENS, TOKENS, MASK), ""),
        (FIRST, FITTING, ""),  # with labels that this chunk does not read
        (FIRST, (None, None, None, TOKENS), "the model was called without tokens"),
        (
            FIRST,
            (TOKENS, TOKENS.int(), None),
            "the model's position_ids must have shape [2, 4] and dtype torch.int64, got [2, 4] torch.int32",
        ),
        (BETWEEN, (None, None, None), ""),
        (BETWEEN, FITTING, ""),
        (BETWEEN, (None, None, MASK), ""),
        (
            BETWEEN,
            (None, None, MASK[:1]),
            "the model's attention_mask must have shape [2, 1, 4, 4] and dtype torch.bool, got [1, 1, 4, 4] torch.bool",
        ),
        (LAST, (None, None, None, TOKENS), ""),
        (LAST, (TOKENS, TOKENS, None), ""),
        (
            LAST,
            (None, None, None, TOKENS[:1]),
            "the model's labels must have shape [2, 4] and dtype torch.int64, got [1, 4] torch.int64",
        ),
    ],
)
def test_chunk_blocker_checks_what_the_chunk_reads(place, args, reason):
    first, last = place
    chunk = Chunk(first, last, None if first else HIDDEN)
    calls = TrainingCalls([chunk])
    chunk(*args)
    assert calls.blocker == reason
