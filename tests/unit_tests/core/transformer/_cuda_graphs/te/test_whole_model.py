"""Test which calls ModelGraphs replays, and its static inputs."""

import copy
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer._cuda_graphs.engine.captured import GraphOwner
from megatron.core.transformer._cuda_graphs.snapshot import Snapshot
from megatron.core.transformer._cuda_graphs.te import model as te_model
from megatron.core.transformer._cuda_graphs.te.model import ModelGraphs, sample_inputs
from megatron.core.transformer._cuda_graphs.te.training_calls import OPTIONAL
from megatron.core.transformer.enums import AttnMaskType

from .stages import MaskedLayer, config

pytestmark = pytest.mark.sampled

SHAPE = 2, 8


class Model(torch.nn.Module):
    """A module that accepts a language model's arguments and counts its calls."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.config = SimpleNamespace(sequence_parallel=False, context_parallel_size=1)
        self.calls = 0

    def forward(
        self,
        input_ids,
        position_ids,
        attention_mask,
        decoder_input=None,
        labels=None,
        *,
        loss_mask=None,
        packed_seq_params=None,
    ):
        self.calls += 1
        return self.weight * input_ids


class Passes:
    """Stand-in for captured graphs that records the inputs of replays."""

    def __init__(self, inputs):
        self.kwargs, self.owner = inputs, GraphOwner()
        self.replayed: list | None = []

    def replay(self, inputs):
        assert self.replayed is not None
        self.replayed.append(inputs)
        return "replayed"

    def reset(self):
        self.replayed = None


def ids(*shape, dtype=torch.int64):
    return torch.zeros(*(shape or SHAPE), dtype=dtype)


def mask(size=SHAPE[1]):
    return torch.zeros(SHAPE[0], 1, size, size, dtype=torch.bool)


def graphed(without=(), more=None):
    """Return a model, its stand-in graphs, and their static inputs.

    ``without`` contains the names of missing inputs, ``more`` additional inputs by name.
    """
    model = Model()
    static = {"input_ids": ids(), "position_ids": ids(), "attention_mask": mask(), "labels": ids()}
    static = {name: tensor for name, tensor in static.items() if name not in without} | (more or {})
    graphs = ModelGraphs(model, [cast(Any, Passes(static))], Snapshot(""))
    return model, graphs, static


def replays(model, *args, **kwargs):
    before = model.calls
    replayed = isinstance(model(*args, **kwargs), str)
    assert model.calls == before + (not replayed)
    return replayed


def test_training_call_replays():
    model, graphs, _ = graphed()
    tokens, positions, given, labels = ids() + 1, ids() + 2, ~mask(), ids() + 3
    assert replays(model, tokens, positions, given, labels=labels)
    assert replays(model, tokens, attention_mask=given, labels=labels, position_ids=positions)
    assert replays(model, tokens, positions, given, None, labels)
    for inputs in graphs.slots[0].replayed:
        assert [id(tensor) for tensor in inputs] == list(map(id, (tokens, positions, given, labels)))


def test_missing_mask_defaults_to_captured_mask():
    model, _, static = graphed()
    for _ in range(2):
        assert replays(model, ids(), ids(), ~mask(), labels=ids())
        static["attention_mask"].copy_(~mask())  # like a replay
        assert replays(model, ids(), ids(), None, labels=ids())
        assert torch.equal(static["attention_mask"], mask())


def test_eager_call_keeps_overwritten_mask():
    model, _, static = graphed()
    assert replays(model, ids(), ids(), ~mask(), labels=ids())
    static["attention_mask"].copy_(~mask())  # like a replay whose backward pass may still read it
    assert not replays(model, ids(2, 4), ids(2, 4), None, labels=ids(2, 4))
    assert torch.equal(static["attention_mask"], ~mask())


def test_model_without_attention_ignores_mask():
    model, _, _ = graphed(without=["attention_mask"])
    assert replays(model, ids(), ids(), None, labels=ids())
    assert replays(model, ids(), ids(), mask(), labels=ids())


@pytest.mark.parametrize(
    "changed",
    [
        {"labels": None},
        {"input_ids": ids(2, 4)},
        {"input_ids": ids(1, 8)},
        {"labels": ids(dtype=torch.int32)},
        {"position_ids": None},
        {"attention_mask": mask(4)},
        {"decoder_input": torch.zeros(8, 2, 4)},
        {"packed_seq_params": PackedSeqParams()},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_call_with_other_arguments_runs_eagerly(changed):
    model, _, _ = graphed()
    arguments = {"input_ids": ids(), "position_ids": ids(), "attention_mask": mask(), "labels": ids()}
    assert replays(model, **arguments)
    assert not replays(model, **arguments | changed)
    assert replays(model, **arguments)


@pytest.mark.parametrize(("without", "other"), [((), "decoder_input"), (["labels"], "labels")])
def test_mismatched_training_calls_are_logged_once(caplog, without, other):
    model, *_ = graphed(without)
    labels = {} if without else {"labels": ids()}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert replays(model, ids(), ids(), mask(), **labels)
            assert not replays(model, ids(), ids(), mask(), **labels | {other: ids()})
    (record,) = caplog.records
    assert "Model runs eagerly because its CUDA graphs do not fit the call" in record.message
    assert f"captured without {other}" in record.message


def test_copied_model_runs_eagerly():
    model, _, _ = graphed()
    copied = copy.deepcopy(model)
    assert not replays(copied, ids(), ids(), mask(), labels=ids())
    assert replays(model, ids(), ids(), mask(), labels=ids())
    assert copied.forward.__self__ is copied


def test_loss_mask_is_a_static_input(caplog):
    model, graphs, _ = graphed(more={"loss_mask": torch.ones(SHAPE)})
    given = torch.zeros(SHAPE)
    assert replays(model, ids(), ids(), None, labels=ids(), loss_mask=given)
    assert graphs.slots[0].replayed[0][-1] is given
    assert not replays(model, ids(), ids(), None, labels=ids())
    (record,) = caplog.records
    assert record.message.endswith("do not fit the call: loss_mask is missing")
    for other in (torch.ones(SHAPE, dtype=torch.bool), torch.ones(1, *SHAPE)):
        assert not replays(model, ids(), ids(), None, labels=ids(), loss_mask=other)


OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv")


def offsets(*ends):
    return torch.tensor([0, *ends], dtype=torch.int32)


def packed(*ends, **changed):
    fields = {"qkv_format": "thd", "max_seqlen_q": 8, "max_seqlen_kv": 8, "pad_between_seqs": False}
    return PackedSeqParams(**fields | dict.fromkeys(OFFSETS, offsets(*ends)) | changed)


def graphed_for_packed():
    return graphed(without=["attention_mask"], more=dict.fromkeys(OFFSETS, offsets(8, 8)))


def test_packed_sequences_become_offsets():
    model, graphs, _ = graphed_for_packed()
    params = packed(3, 8)
    assert replays(model, ids(), ids(), None, labels=ids(), packed_seq_params=params)
    assert [id(tensor) for tensor in graphs.slots[0].replayed[0][-2:]] == [id(params.cu_seqlens_q)] * 2


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (None, "the module was captured for packed sequences, got none. With --cuda-graph-packed-sequences"),
        (
            packed(8, 8, max_seqlen_q=3),
            "captured for packed sequences with max_seqlen_q 8, got 3. With --cuda",
        ),
        (packed(3, 4, 8), "other shapes, dtypes or devices than at capture"),
    ],
    ids=["none", "not padded", "more of them"],
)
def test_other_packed_sequences_run_eagerly(caplog, params, reason):
    model, *_ = graphed_for_packed()
    assert not replays(model, ids(), ids(), None, labels=ids(), packed_seq_params=params)
    assert replays(model, ids(), ids(), None, labels=ids(), packed_seq_params=packed(3, 8))
    (record,) = caplog.records
    assert reason in record.message


def language_model(*layers, positions="rope", predicts=False, **options):
    model: Any = torch.nn.Module()
    if predicts:
        model.mtp = torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList(layers)
    model.position_embedding_type = positions
    model.config = config(context_parallel_size=1, **options)
    return model


def shapes(model, sequences=1):
    inputs = sample_inputs(model, 8, sequences, OPTIONAL)
    return {name: (list(tensor.shape), tensor.dtype) for name, tensor in inputs.items()}


IDS = [1, 8], torch.int64
MASKED = {"input_ids": IDS, "position_ids": IDS, "labels": IDS, "attention_mask": ([1], torch.float32)}


@pytest.mark.usefixtures("cpu_backend")
def test_static_inputs_match_the_model():
    assert shapes(language_model(MaskedLayer())) == MASKED
    with_mask = {"loss_mask": ([1, 8], torch.float32)}
    assert shapes(language_model(MaskedLayer(), predicts=True)) == MASKED | with_mask
    multimodal = {"position_ids": ([3, 1, 8], torch.int64)}
    assert shapes(language_model(MaskedLayer(), positions="mrope")) == MASKED | multimodal


class NoAttention(MaskedLayer):
    """A layer without attention."""

    def __init__(self):
        super().__init__()
        del self.self_attention


@pytest.mark.usefixtures("cpu_backend")
def test_static_mask_follows_first_attention_layer():
    assert "attention_mask" not in shapes(language_model(NoAttention()))
    unmasked = language_model(NoAttention(), MaskedLayer(AttnMaskType.padding))
    assert sample_inputs(unmasked, 8, 1, OPTIONAL)["attention_mask"].tolist() == [0.0]
    model = language_model(MaskedLayer())
    assert sample_inputs(model, 8, 1, OPTIONAL)["attention_mask"].tolist() == [1.0]
    assert [*sample_inputs(model, 8, 1, ())] == ["input_ids", "position_ids"]


class Chunk(Model):
    """A middle pipeline chunk that reads hidden states.

    Attributes:
        microbatches: Number of micro-batches per step.
    """

    microbatches = 2

    def __init__(self):
        super().__init__()
        self.pre_process = self.post_process = False
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
        self.decoder.input_tensor = None

    def forward(self, input_ids, position_ids, attention_mask, *args, **kwargs):
        self.calls += 1
        return self.weight * cast(Any, self.decoder).input_tensor


def hidden(length=SHAPE[1], value=0.0):
    return torch.full((length, SHAPE[0], 4), value, requires_grad=True)


@pytest.fixture
def chunk(monkeypatch):
    """Return a chunk with graphs for steps of two micro-batches, and the slot of each micro-batch."""
    chunk = Chunk()
    monkeypatch.setattr(te_model, "get_num_microbatches", lambda: chunk.microbatches)
    slots = [Passes({"attention_mask": mask(), "hidden_states": hidden()}) for _ in range(2)]
    ModelGraphs(chunk, cast(Any, slots), Snapshot(""))
    return chunk, slots


def call(chunk, microbatch, hidden_states, *args):
    """Call a chunk as a pipeline schedule does, and return whether it replayed."""
    vars(chunk.decoder.layers[0])["current_microbatch"] = microbatch
    chunk.decoder.input_tensor = hidden_states
    return replays(chunk, *args) if args else replays(chunk, None, None, None)


def test_each_micro_batch_replays_its_own_slot(chunk):
    chunk, slots = chunk
    given = [hidden(value=1.0), hidden(value=2.0)]
    assert all(call(chunk, number, given[number]) for number in (0, 1))
    for slot, hidden_states in zip(slots, given, strict=True):
        (inputs,) = slot.replayed
        assert [id(tensor) for tensor in inputs] == [id(slot.kwargs["attention_mask"]), id(hidden_states)]


@pytest.mark.parametrize(("microbatch", "microbatches"), [(0, 3), (2, 2), (None, 2)])
def test_other_micro_batch_count_runs_eagerly(chunk, caplog, microbatch, microbatches):
    chunk, _ = chunk
    chunk.microbatches = microbatches
    with caplog.at_level(logging.WARNING):
        assert not any(call(chunk, microbatch, hidden()) for _ in range(2))
    (record,) = caplog.records
    assert "captured for steps of 2 micro-batches" in record.message
