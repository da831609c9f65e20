"""Test static inputs of slots, and their sharing across slots."""

import functools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer._cuda_graphs.engine.plan import Pass, ordered_plan
from megatron.core.transformer._cuda_graphs.te.sample_inputs import LayerInputs, packed_use, sample_arguments
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

from ..pipeline_orders import orders


def inputs_of(plan, width_of_callable=lambda index: 1):
    """Return each slot's sample inputs, and the indices of the callables for which inputs were created.

    ``width_of_callable`` returns the size of a callable's input.
    """
    made = []

    def make(index):
        made.append(index)
        return (torch.zeros(width_of_callable(index)),), {"mask": torch.zeros(2, dtype=torch.bool)}

    return sample_arguments(plan, make), made


def shared(samples):
    """For each slot, return the first slot with the same inputs."""
    return [next(i for i, other in enumerate(samples) if other is sample) for sample in samples]


@pytest.mark.parametrize(
    "other",
    [
        ((torch.zeros(3),), {}),
        ((torch.zeros(2, dtype=torch.bfloat16),), {}),
        ((torch.zeros(2).to_sparse(),), {}),
        ((torch.zeros(2),), {"mask": torch.zeros(2)}),
        ((), {"hidden_states": torch.zeros(2)}),
        ((torch.zeros(2), torch.zeros(2)), {}),
    ],
    ids=["shape", "dtype", "layout", "one keyword more", "name", "one position more"],
)
def test_different_inputs_are_not_shared(other):
    makes = [lambda: ((torch.zeros(2),), {}), lambda: other]
    samples = sample_arguments(ordered_plan([1, -1, 2, -2], [1, 1], 2), lambda index: makes[index]())
    assert shared(samples) == [0, 1]


@given(orders())
def test_live_inputs_are_not_shared(case):
    order, layers, _ = case
    plan = ordered_plan(order, layers, sum(layers))
    samples, _ = inputs_of(plan, lambda index: index % 2)
    live: set[int] = set()
    for position, step in enumerate(plan.steps):
        sample = id(samples[step.slot])
        if step.kind is Pass.FORWARD:
            assert sample not in live
            live.add(sample)
        elif is_last(plan, position):
            live.remove(sample)


def is_last(plan, position):
    """Return whether the step at ``position`` is the last of its slot."""
    return plan.steps[position].slot not in [step.slot for step in plan.steps[position + 1 :]]


@given(orders())
def test_number_of_inputs_is_the_peak_of_live_inputs(case):
    order, layers, _ = case
    plan = ordered_plan(order, layers, sum(layers))
    samples, _ = inputs_of(plan, lambda index: index % 2)
    for kind in (0, 1):
        live, peak = 0, 0
        for position, step in enumerate(plan.steps):
            if plan.callable_of_slot[step.slot] % 2 == kind:
                live += (step.kind is Pass.FORWARD) - is_last(plan, position)
                peak = max(peak, live)
        buffers = {id(samples[i]) for i, index in enumerate(plan.callable_of_slot) if index % 2 == kind}
        assert len(buffers) == peak


class Layer:
    """A layer with the attributes that ``LayerInputs`` reads."""

    def __init__(self, modules=(), attention: object = "attention"):
        self.config = SimpleNamespace(cuda_graph_modules=list(modules))
        self.self_attention = attention

    def get_layer_static_inputs(self, seq_length, micro_batch_size):
        return {"hidden_states": torch.zeros(seq_length, micro_batch_size, 4), "attention_mask": torch.ones(1)}


class Rotary:
    """A rotary embedding that records the tables it returns."""

    def __init__(self):
        self.tables = []

    def get_rotary_seq_len(self, context, decoder, hidden_states, config, packed):
        return hidden_states.shape[0]

    @functools.lru_cache(maxsize=32)  # noqa: B019, as megatron-core's
    def forward(self, length, packed_seq=False):
        self.tables.append(torch.zeros(length, 1, 1, 2))
        return self.tables[-1]


def model(position_embedding_type="rope"):
    return SimpleNamespace(position_embedding_type=position_embedding_type, decoder=None, rotary_pos_emb=Rotary())


def layer_inputs(micro_batch_size=2, **config):
    given = {"multi_latent_attention": False, "context_parallel_size": 1, **config}
    return LayerInputs(SimpleNamespace(**given), 8, micro_batch_size)


def test_packed_sequences_need_one_row():
    with pytest.raises(ValueError, match=r"--cuda-graph-packed-sequences needs .* one row: set --micro-batch-size 1"):
        layer_inputs(micro_batch_size=2, cuda_graph_packed_sequences=4)


@pytest.mark.parametrize(
    ("modules", "attention", "expected"),
    [
        ([], SimpleNamespace(), "read"),
        ([CudaGraphModule.attn], SimpleNamespace(), "read"),
        ([CudaGraphModule.moe_router], SimpleNamespace(), None),
        ([], IdentityOp(), "unused"),
        ([CudaGraphModule.attn], IdentityOp(), None),
    ],
    ids=["whole layer", "attn", "router", "no attention", "attn of a layer without"],
)
def test_layers_need_packed_sequences_for_attention_only(modules, attention, expected):
    layer = Layer(modules, attention=attention)
    assert packed_use(layer) is None
    layer.config.cuda_graph_packed_sequences = 4
    assert packed_use(layer) == expected


def test_layers_share_one_rotary_table():
    inputs, chunk = layer_inputs(), model()
    tables = {id(inputs.make(Layer(), chunk)[1]["rotary_pos_emb"]) for _ in range(3)}
    assert tables == {id(chunk.rotary_pos_emb.tables[0])}
    assert len(chunk.rotary_pos_emb.tables) == 1
    assert Rotary.forward.cache_info().currsize == 0  # which would keep the table after the graphs


@pytest.mark.parametrize(("packed", "length"), [(None, 8), (4, 16)])
def test_packed_sequences_read_the_whole_rotary_table(cpu_backend, packed, length):
    chunk, ranks = model(), SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    chunk.decoder = SimpleNamespace(input_tensor=None)
    chunk.rotary_pos_emb = RotaryEmbedding(4, 1.0, cp_group=ranks)
    config = {"context_parallel_size": 2, "sequence_parallel": False, "cuda_graph_packed_sequences": packed}
    _, made = layer_inputs(1, **config).make(Layer(), chunk)  # of 8 tokens on each of 2 ranks
    assert len(made["rotary_pos_emb"]) == length


def test_each_slot_has_its_own_mrope_table():
    asked = []

    def rotary(positions, section):
        asked.append((tuple(positions.shape), positions.dtype, section))
        return torch.zeros(8, 2, 1, 2)

    chunk = SimpleNamespace(position_embedding_type="mrope", rotary_pos_emb=rotary, mrope_section=[1, 1, 0])
    inputs = layer_inputs()
    tables = [inputs.make(Layer(), chunk)[1]["rotary_pos_emb"] for _ in range(2)]
    assert tables[0] is not tables[1]
    assert asked == [((3, 2, 8), torch.int64, [1, 1, 0])] * 2


@pytest.mark.parametrize(
    ("config", "layer", "chunk"),
    [
        ({}, Layer([CudaGraphModule.moe_router]), model()),
        ({}, Layer(), model("learned_absolute")),
        ({}, Layer(), SimpleNamespace()),
        ({}, Layer(), None),
        ({"multi_latent_attention": True}, Layer(), model()),
    ],
    ids=[
        "attention is eager",
        "learned positions",
        "no positions",
        "no language model",
        "latent attention has its own",
    ],
)
def test_other_layers_get_no_rotary_table(config, layer, chunk):
    assert list(layer_inputs(**config).make(layer, chunk)[1]) == ["attention_mask"]


def transformer_layer(kind=TransformerLayer, parts=1):
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.self_attention = torch.nn.Identity()
    layer.config = SimpleNamespace(
        cuda_graph_modules=[],
        context_parallel_size=parts,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        hidden_size=4,
        fp32_residual_connection=False,
        bf16=True,
    )
    return layer


@pytest.mark.parametrize("parts", [1, 2])
def test_mask_is_not_made_on_the_host(cpu_backend, monkeypatch, parts):
    layer = transformer_layer(parts=parts)
    expected = layer.get_layer_static_inputs(8, 2)
    monkeypatch.setattr(torch, "tril", lambda *_: pytest.fail("a mask is made on the host"))
    (hidden_states,), inputs = layer_inputs(context_parallel_size=parts).make(layer, None)
    made = {"hidden_states": hidden_states, **inputs}
    assert list(made) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor)
        assert (made[name].dtype, made[name].device) == (tensor.dtype, tensor.device)
