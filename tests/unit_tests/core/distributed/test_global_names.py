"""Test that names in checkpoints contain global layer numbers."""

import pytest

pytest.importorskip("megatron.core")

from torch import nn

from megatron.core.distributed.fsdp.global_names import by_global_name, global_name, unused_output_weights


class Layer(nn.Linear):
    def __init__(self, number):
        super().__init__(1, 1)
        self.layer_number = number


def chunk(*numbers, wrappers=1, **others):
    """Return a wrapped model chunk with one layer per global layer number (from 1) in ``numbers``."""
    made = nn.ModuleDict({"decoder": nn.ModuleDict({"layers": nn.ModuleList(map(Layer, numbers))}), **others})
    for _ in range(wrappers):
        made = nn.ModuleDict({"module": made})
    return made


@pytest.mark.parametrize("wrappers", [0, 1, 3])
@pytest.mark.parametrize("prefix", ["", "module.", "module.module."])
def test_layers_have_global_numbers(wrappers, prefix):
    rename = global_name(chunk(11, 12, wrappers=wrappers))
    assert rename(f"{prefix}decoder.layers.0.weight") == f"{prefix}decoder.layers.10.weight"
    assert rename(f"{prefix}decoder.layers.1") == f"{prefix}decoder.layers.11"


def test_other_names_stay_unchanged():
    rename = global_name(
        chunk(3, embedding=nn.Embedding(2, 2), vision=nn.ModuleDict({"layers": nn.ModuleList([nn.ReLU()])}))
    )
    for name in (
        "",
        "module.embedding.weight",
        "module.vision.layers.0.weight",
        "module.decoder.layers.0x",
        "decoder.layers",
    ):
        assert rename(name) == name


@pytest.mark.parametrize(
    ("where", "inner"), [(lambda block: block["module"], ""), (lambda block: block["module"]["decoder"], "decoder.")]
)
@pytest.mark.parametrize("prefix", ["", "module.", "module.module."])
def test_tied_output_layers_use_the_name_of_the_embedding(where, inner, prefix):
    block = chunk(3)
    where(block).share_embeddings_and_output_weights = True
    rename = global_name(block)
    assert rename(f"{prefix}{inner}output_layer.weight") == f"{prefix}{inner}embedding.word_embeddings.weight"
    assert rename(f"{prefix}other.output_layer.weight") == f"{prefix}other.output_layer.weight"
    where(block).embedding = nn.Embedding(2, 2)  # as in a single stage, or in a last stage with multi-token prediction
    assert global_name(block)(f"{prefix}{inner}output_layer.weight") == f"{prefix}{inner}output_layer.weight"


@pytest.mark.parametrize(
    ("shares", "embedding", "pre_process", "unused"),
    [(True, True, False, 1), (False, True, False, 0), (True, False, False, 0), (True, True, True, 0)],
)
def test_tied_output_layers_beside_an_embedding_are_unused(shares, embedding, pre_process, unused):
    block = chunk(3)
    model = block["module"]
    model.share_embeddings_and_output_weights, model.pre_process = shares, pre_process
    if embedding:
        model.embedding = nn.Embedding(2, 2)
    assert unused_output_weights([chunk(1), block]) == {*["output_layer.weight"][:unused]}


def test_only_outer_layers_are_renumbered():
    block = chunk(3)
    block["module"]["decoder"]["layers"][0].experts = nn.ModuleDict({"layers": nn.ModuleList([Layer(9)])})
    assert global_name(block)("decoder.layers.0.experts.layers.0.weight") == "decoder.layers.2.experts.layers.0.weight"


def test_chunks_of_a_stage_are_merged():
    chunks = [chunk(1), chunk(3)]
    merged = by_global_name(chunks, [dict(each.named_parameters()) for each in chunks])
    layers = [each["module"]["decoder"]["layers"][0] for each in chunks]
    names = {f"module.decoder.layers.{number}.{kind}" for number in (0, 2) for kind in ("weight", "bias")}
    assert merged.keys() == names
    assert merged["module.decoder.layers.0.weight"] is layers[0].weight
    assert merged["module.decoder.layers.2.weight"] is layers[1].weight


def test_name_in_two_chunks_is_refused():
    chunks = [chunk(1), chunk(3)]
    with pytest.raises(
        ValueError, match=r"embedding\.weight is in two chunks .*--num-virtual-stages-per-pipeline-rank"
    ):
        by_global_name(chunks, [{"embedding.weight": 1}, {"embedding.weight": 2}])
