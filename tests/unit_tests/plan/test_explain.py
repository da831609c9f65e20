"""``python -m megatron_fsdp_cuda_graphs explain``."""

import pytest

from megatron_fsdp_cuda_graphs.plan import command

from .conftest import DENSE, EXPERTS

REST = "--num-layers 2 --world-size 2"


def explained(capsys, arguments):
    """The exit code, and for each part its state, its reason and the change that graphs it."""
    code = command.explain(arguments)
    parts: dict[str, tuple[str, str, str | None]] = {}
    name = ""
    for line in capsys.readouterr().out.splitlines():
        text = line.strip()
        if text.startswith(("graphed ", "eager ")):
            state, rest = text.split(maxsplit=1)
            name, why = rest.split("): ")
            parts[name + ")"] = state, why, None
        elif text.startswith("to graph it: "):
            parts[name + ")"] = (*parts[name + ")"][:2], text.removeprefix("to graph it: "))
    return code, parts


def test_whole_layers(capsys, flags):
    code, parts = explained(capsys, flags(DENSE, REST, "--cuda-graph-layers-per-graph all"))
    assert code == 0
    whole = "graphed", "whole layers are captured", None
    outside = (
        "eager",
        "outside of layers, and graphs hold layers",
        "drop --cuda-graph-layers-per-graph",
    )
    assert parts == {
        "embedding (1)": outside,
        "attention, with the norm before it (2)": whole,
        "MLP of dense layers, with the norm before it (2)": whole,
        "final norm (1)": outside,
        "output layer and losses (1)": outside,
    }


@pytest.mark.parametrize("more", ["", "--cuda-graph-layers-per-graph model"])
def test_the_whole_model(capsys, flags, more):
    _, parts = explained(capsys, flags(DENSE, REST, more))
    assert len(parts) == 5
    assert {*parts.values()} == {("graphed", "in the graphs of the whole model", None)}


def test_parts_of_dense_layers(capsys, flags):
    _, parts = explained(capsys, flags(DENSE, REST, "--cuda-graph-modules attn"))
    assert parts["attention, with the norm before it (2)"][:2] == ("graphed", "--cuda-graph-modules has attn")
    assert parts["MLP of dense layers, with the norm before it (2)"] == (
        "eager",
        "--cuda-graph-modules is attn, without mlp",
        "--cuda-graph-modules attn mlp",
    )
    assert parts["embedding (1)"][2] == "drop --cuda-graph-modules"


def test_parts_of_moe_layers(capsys, flags):
    modules = "--cuda-graph-modules attn moe_router"
    _, parts = explained(capsys, flags(DENSE, EXPERTS, REST, modules))
    assert parts["shared experts (2)"] == ("graphed", "with the router", None)
    assert parts["preparation of the dispatch to experts (2)"][2] == (
        "--cuda-graph-modules attn moe_preprocess moe_router"
    )
    # The router's graph and the whole layer's exclude each other, and the host must not wait for counts of tokens.
    grouped = "drop --cuda-graph-modules, add --moe-use-grouped-tensor"
    assert parts["experts, with the exchange of tokens (2)"][2] == grouped
    assert parts["output layer and losses (1)"][2] == grouped


def test_experts_that_do_not_fit_one_product_are_padded(capsys, flags):
    modules = "--cuda-graph-modules attn moe_router --tensor-model-parallel-size 2 --sequence-parallel"
    _, parts = explained(capsys, flags(DENSE, EXPERTS, REST, modules))
    assert parts["experts, with the exchange of tokens (2)"][2] == (
        "--cuda-graph-modules attn moe --moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0"
    )


def test_shared_experts_beside_the_dispatch(capsys, flags):
    modules = "--cuda-graph-modules attn moe_router --moe-shared-expert-overlap"
    _, parts = explained(capsys, flags(DENSE, EXPERTS, REST, modules))
    state, why, _ = parts["shared experts (2)"]
    assert state == "eager"
    assert why.startswith("--moe-shared-expert-overlap lets them run beside the dispatch")


def test_multi_token_prediction(capsys, flags):
    repeated = "--mtp-num-layers 2 --mtp-use-repeated-layer"
    _, parts = explained(capsys, flags(DENSE, REST, repeated))
    assert {*parts.values()} == {("graphed", "in the graphs of the whole model", None)}
    assert "repeated layer of multi-token prediction (1)" in parts
    _, parts = explained(capsys, flags(DENSE, REST, repeated, "--cuda-graph-layers-per-graph all"))
    assert parts["repeated layer of multi-token prediction (1)"][0] == "eager"
    assert parts["multi-token prediction outside of its layers (1)"][0] == "eager"
    assert parts["attention, with the norm before it (2)"][0] == "graphed"


def test_layers_that_are_computed_again_and_cannot_be_in_one_graph(capsys, flags):
    more = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --mtp-num-layers 1"
    _, parts = explained(capsys, flags(DENSE, REST, more, "--cuda-graph-layers-per-graph all"))
    assert {state for state, *_ in parts.values()} == {"eager"}
    assert parts["attention, with the norm before it (3)"][1].startswith("layers are computed again")


def test_a_hybrid_model(capsys, flags):
    pattern = "--hybrid-layer-pattern M*M- --spec tests.support.layers.hybrid_spec local --cuda-graph-modules attn"
    _, parts = explained(capsys, flags(DENSE, pattern, "--world-size 2"))
    assert parts["attention, with the norm before it (1)"][0] == "graphed"
    assert parts["Mamba mixer, with the norm before it (2)"] == (
        "eager",
        "--cuda-graph-modules is attn, without mamba",
        "--cuda-graph-modules attn mamba",
    )
    assert parts["final norm (1)"][0] == "eager"
    assert parts["embedding (1)"][2] == "drop --cuda-graph-modules"
