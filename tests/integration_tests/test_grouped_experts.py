"""Test graphs of whole MoE layers with dropless experts, whose token counts stay on the GPU.

On two CPU ranks, training is bit-identical to eager, including logged MoE metrics. It differs only in rounding from
training without ``--moe-use-grouped-tensor``.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import assert_as_eager, captures_model
from tests.support.trainings.models import FULL_RECOMPUTE
from tests.support.trainings.rounding import ROUNDING

MOE: dict[str, Any] = {"experts": 4, "moe_use_grouped_tensor": True, "layers": 2, "steps": 6}
BF16: dict[str, Any] = {"dtype": "bf16", "microbatches": 2}
WIDE: dict[str, Any] = {"moe_shared_expert_intermediate_size": 64}
OVERLAPPED: dict[str, Any] = WIDE | {"moe_shared_expert_overlap": True}
PARTS: dict[str, Any] = {"modules": ["attn", "moe_router", "moe_preprocess"]}
GATHERED: dict[str, Any] = {"moe_token_dispatcher_type": "allgather"}
MODEL: dict[str, Any] = {"holds": "model"}
CASES: list[dict[str, Any]] = [
    # All tokens are routed to the same two experts, or to one.
    {"unbalanced": True, **BF16, "moe_router_topk": 1, "moe_apply_probs_on_input": True},
    {"moe_router_load_balancing_type": "seq_aux_loss", "moe_z_loss_coeff": 1e-3, **BF16, "dropout": 0.1},
    {"moe_router_load_balancing_type": "global_aux_loss", "add_bias_linear": True, "mtp": 1, "dtype": "bf16"},
    {**BF16, "holds": "layer", "dropout": 0.1},
    {**BF16, **GATHERED, **WIDE},
    {"layers": 3, "moe_layer_freq": [0, 1, 1], "gated_linear_unit": True, **BF16},
    {**OVERLAPPED, "evaluates": "often"},
    {**OVERLAPPED, **BF16, **PARTS},
    {"recompute_modules": ["moe"], "holds": "layer", **BF16},
    {"data_parallel_sharding_strategy": "optim_grads", "holds": "layer", "control": "captured_again"},
    {"sequences_later": [16, 32], "steps": 8},
    {"wrapper": "ddp", **BF16, "holds": "layer"},
    {"wrapper": "ddp", **BF16, "holds": "layer", "gradient_accumulation_fusion": True},
    {"wrapper": "ddp", **BF16, "holds": "layer", **OVERLAPPED},
    MODEL | {"unbalanced": True, "evaluates": True, "warmup": 0},
    MODEL | {"unbalanced": True, **BF16, "moe_router_topk": 1, "norm_on_device": True},
    MODEL | {"layers": 3, "moe_layer_freq": [0, 1, 1], "dropout": 0.1, "moe_z_loss_coeff": 1e-3, **BF16},
    MODEL | {**OVERLAPPED, "dtype": "bf16", "moe_router_load_balancing_type": "global_aux_loss"},
    # Like DeepSeek-V3: latent attention, and a sigmoid router with expert bias
    MODEL | {"experts": 8, "unbalanced": True, "multi_latent_attention": True, **WIDE, "moe_router_topk": 4},
    MODEL | {"recompute_modules": ["moe"], "microbatches_later": 2, "control": "captured_again"},
    MODEL | FULL_RECOMPUTE | {"microbatches": 2},
    MODEL | {"gradient_accumulation_fusion": True, **BF16},
    MODEL | {"moe_latent_size": 32, **WIDE, **BF16},
]
EP: list[dict[str, Any]] = [
    {},
    GATHERED,
    {**GATHERED, "unbalanced": True, **BF16},  # experts on the second rank receive no tokens
    {"unbalanced": True, **BF16},
    {**OVERLAPPED, "evaluates": True, **BF16},
    {**PARTS, **BF16},
    {"experts": 2, "recompute_modules": ["moe"], "holds": "layer", "add_bias_linear": True, **BF16},
    {**GATHERED, "evaluates": True, **WIDE, "holds": "layer"},
    MODEL | {"evaluates": True, **BF16},
    {"wrapper": "ddp", "holds": "layer", "moe_latent_size": 32, **BF16},
]
DDP: dict[str, Any] = {"wrapper": "ddp", "holds": "layer"}
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "--tp 2 --etp 1 --ep 2": [
        {"sequence_parallel": True, **BF16, **case} for case in (MODEL, MODEL | GATHERED, DDP | PARTS, DDP)
    ],
    "--cp 2 --ep 2": [BF16 | case for case in (MODEL, DDP)],
    "--pp 2": [
        {"layers": 4, "dtype": "bf16", "microbatches": 4, **case} for case in (MODEL, DDP, DDP | PARTS | {"virtual": 2})
    ],
}
IN_LAYOUTS = [(layout, case) for layout, cases in LAYOUTS.items() for case in cases]
FOUR_RANKS: list[tuple[str, dict[str, Any]]] = [
    ("2", MODEL | {"unbalanced": True, **BF16}),
    ("4", MODEL | {"experts": 8, "moe_router_topk": 4, **BF16}),
]


def assert_replayed(result, case):
    assert_as_eager(result)
    layers = case.get("layers", MOE["layers"]) + case.get("mtp", 0)
    whole = captures_model(case)
    assert result["graphs"] == (0 if whole else layers)
    microbatches = case.get("microbatches_later", case.get("microbatches", 1))
    assert result["replays"] == 2 * (1 if whole else layers) * microbatches


@pytest.mark.parametrize("case", mostly_long(CASES, CASES[16]))
def test_graphs_are_bit_identical_to_eager(trained, case):
    assert_replayed(trained(MOE | case), case)


@pytest.mark.parametrize("case", mostly_long(EP, EP[8]))
def test_expert_parallel_graphs_are_bit_identical_to_eager(trained, case):
    assert_replayed(trained(MOE | case, "--ep", "2"), case)


@pytest.mark.parametrize(("layout", "case"), mostly_long(IN_LAYOUTS, IN_LAYOUTS[0]))
def test_graphs_in_other_layouts_are_bit_identical_to_eager(trained, layout, case):
    result = trained(MOE | case, *layout.split())
    assert_as_eager(result)
    pieces = 1 if case["holds"] == "model" else 2  # of this stage
    assert result["replays"] == 2 * pieces * case["microbatches"]


@pytest.mark.long
@pytest.mark.parametrize(("ep", "case"), FOUR_RANKS)
def test_graphs_on_four_ranks_are_bit_identical_to_eager(trained, ep, case):
    assert_replayed(trained(MOE | case, "--ep", ep, ranks=4), case)


@pytest.mark.long
def test_dispatchers_give_equal_losses(trained):
    sent, gathered = (trained(MOE | case, "--ep", "2") for case in EP[:2])
    assert gathered["losses"] == sent["losses"]
    assert gathered["grad_norms"] == sent["grad_norms"]


@pytest.mark.long
@pytest.mark.parametrize("ep", ["1", "2"])
def test_without_the_flag_only_rounding_differs(trained, ep):
    mine = trained(MOE, "--ep", ep)
    theirs = trained(MOE | {"moe_use_grouped_tensor": False, "modules": ["attn"]}, "--ep", ep)
    for kind in ("losses", "grad_norms"):
        assert mine[kind][0] == pytest.approx(theirs[kind][0], rel=ROUNDING), kind
        assert mine[kind] == pytest.approx(theirs[kind], rel=ROUNDING * MOE["steps"]), kind
