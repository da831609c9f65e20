"""Dropless experts whose tokens only the device counts (--moe-use-grouped-tensor): graphs hold whole MoE layers.

Trainings on two CPU ranks equal eager ones with the flag bit for bit, over 6 steps with capture after 3, in what MoE
layers record for the log too. Without the flag only rounding differs.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import Trained, assert_as_eager
from tests.support.trainings.launch import name_of
from tests.support.trainings.rounding import ROUNDING

MOE: dict[str, Any] = {"experts": 4, "grouped_tensor": True, "layers": 2, "steps": 6}
BF16: dict[str, Any] = {"dtype": "bf16", "microbatches": 2}
SHARED: dict[str, Any] = {"shared_experts": 64, "shared_overlap": True}
ROUTERS: list[dict[str, Any]] = [
    # Every token to the same two experts, or to one, and none to the others.
    {"unbalanced": True, "evaluates": True},
    {"unbalanced": True, **BF16, "config": ["moe_router_topk=1", "moe_apply_probs_on_input=True"]},
    {"config": ["moe_router_load_balancing_type='seq_aux_loss'", "moe_z_loss_coeff=1e-3"], **BF16, "dropout": 0.1},
    {"config": ["moe_router_load_balancing_type='global_aux_loss'", "add_bias_linear=True"], "mtp": 1, "dtype": "bf16"},
]
LAYERS: list[dict[str, Any]] = [
    {},
    {**BF16, "holds": "layer", "dropout": 0.1},
    {**BF16, "dispatcher": "allgather", "shared_experts": 64},
    {"layers": 3, "moe_layer_freq": [0, 1, 1], "config": ["gated_linear_unit=True"], **BF16},
    {**SHARED, "evaluates_often": True},
    {**SHARED, **BF16, "modules": ["attn", "moe_router", "moe_preprocess"]},
    {"recompute": ["moe"]},
    {"recompute": ["moe"], "holds": "layer", **BF16},
    {"strategy": "optim_grads", "control": "captured_again"},
    {"sequences_later": [16, 32], "steps": 8},
    {"fsdp": False, **BF16, "holds": "layer"},
    {"fsdp": False, "local": True, "evaluates": True, "holds": "layer", **BF16},
]
# With the experts divided among the ranks.
PARALLEL: list[dict[str, Any]] = [
    {"dispatcher": "allgather", "unbalanced": True, **BF16},  # the second rank's experts get no tokens
    {"unbalanced": True, **BF16},
    {"dispatcher": "allgather"},
    {},
    {**SHARED, "evaluates": True, **BF16},
    {"modules": ["attn", "moe_router", "moe_preprocess"], **BF16},
    {"experts": 2, "recompute": ["moe"], "holds": "layer", "config": ["add_bias_linear=True"], **BF16},
    {"dispatcher": "allgather", "evaluates": True, "shared_experts": 64, "holds": "layer"},
]
WHOLE: list[dict[str, Any]] = [
    {"holds": "model", **case}
    for case in (
        {"unbalanced": True, "evaluates": True, "warmup": 0},
        {"unbalanced": True, **BF16, "config": ["moe_router_topk=1"], "norm_on_device": True},
        {"layers": 3, "moe_layer_freq": [0, 1, 1], "dropout": 0.1, "config": ["moe_z_loss_coeff=1e-3"], **BF16},
        {**SHARED, "dtype": "bf16", "config": ["moe_router_load_balancing_type='global_aux_loss'"]},
        # A small DeepSeek-V3: latent attention, a sigmoid router with expert bias.
        {
            "experts": 8,
            "unbalanced": True,
            "latent_attention": True,
            "shared_experts": 64,
            "config": ["moe_router_topk=4"],
        },
        {"recompute": ["moe"], "microbatches": 1, "microbatches_later": 2, "control": "captured_again"},
    )
]
# Whole models, by the number of ranks, all of which or two have the experts.
SHARED_OUT: dict[str, dict[str, Any]] = {
    "2 of 2": {"evaluates": True, **BF16},
    "2 of 4": {"unbalanced": True, **BF16},
    "4 of 4": {"experts": 8, "config": ["moe_router_topk=4"], **BF16},
}
EQUAL = [*ROUTERS, *LAYERS]
WITHOUT: dict[str, Any] = {"grouped_tensor": False, "modules": ["attn"]}


@pytest.fixture(scope="session")
def results(compare_runs):
    return Trained([*EQUAL, *WHOLE, WITHOUT], compare_runs, MOE)


@pytest.fixture(scope="session")
def parallel(compare_runs):
    return Trained([*PARALLEL, WITHOUT], compare_runs, MOE, "--ep", "2")


@pytest.fixture(scope="session")
def shared_out(compare_runs):
    def train(of: str) -> dict[str, Any]:
        ep, ranks = of.split(" of ")
        (result,) = compare_runs([{**MOE, "holds": "model", **SHARED_OUT[of]}], "--ep", ep, ranks=int(ranks))
        return result

    return train


def assert_replayed(result, case):
    assert_as_eager(result)
    layers = case.get("layers", MOE["layers"])
    of_each = bool({"modules", "local"} & {*case}) or case.get("holds") == "layer" or "strategy" in case
    pieces = (layers if of_each else 1) + case.get("mtp", 0)
    assert result["graphs"] == layers + case.get("mtp", 0)
    if "local" not in case:  # whose replays are not counted
        assert result["replays"] == 2 * pieces * case.get("microbatches", 1)


def assert_replayed_whole(result, case):
    assert_as_eager(result)
    assert result["graphs"] == 0
    assert result["replays"] == 2 * case.get("microbatches_later", case.get("microbatches", 1))


@pytest.mark.parametrize("case", mostly_long(EQUAL, LAYERS[4]), ids=name_of)
def test_graphs_of_moe_layers_train_bit_for_bit_as_eager(results, case):
    assert_replayed(results[name_of(case)], case)


@pytest.mark.parametrize("case", mostly_long(WHOLE, WHOLE[2]), ids=name_of)
def test_graphs_of_a_whole_moe_model_train_bit_for_bit_as_eager(results, case):
    assert_replayed_whole(results[name_of(case)], case)


@pytest.mark.parametrize("case", mostly_long(PARALLEL, PARALLEL[1]), ids=name_of)
def test_experts_of_several_ranks_train_bit_for_bit_as_eager(parallel, case):
    assert_replayed(parallel[name_of(case)], case)


@pytest.mark.parametrize("of", mostly_long(SHARED_OUT, "2 of 2"))
def test_a_whole_model_with_experts_of_several_ranks_trains_bit_for_bit_as_eager(shared_out, of):
    assert_replayed_whole(shared_out(of), SHARED_OUT[of])


def test_tokens_that_all_ranks_gather_or_that_are_sent_train_alike(parallel):
    gathered, sent = (parallel[name_of(case)] for case in PARALLEL[2:4])
    assert gathered["losses"] == sent["losses"]
    assert gathered["grad_norms"] == sent["grad_norms"]


@pytest.mark.parametrize(
    ("trained", "case"), [pytest.param("results", LAYERS[0], marks=pytest.mark.long), ("parallel", PARALLEL[3])]
)
def test_without_the_flag_only_rounding_differs(request, trained, case):
    trained = request.getfixturevalue(trained)
    mine, theirs = trained[name_of(case)], trained[name_of(WITHOUT)]
    for kind in ("losses", "grad_norms"):
        assert mine[kind][0] == pytest.approx(theirs[kind][0], rel=ROUNDING), kind
        assert mine[kind] == pytest.approx(theirs[kind], rel=ROUNDING * MOE["steps"]), kind
