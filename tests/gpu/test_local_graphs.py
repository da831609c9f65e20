"""With local graphs, a model under DistributedDataParallel trains bit for bit as eagerly.

Layouts: data parallel over all GPUs; tensor parallel; expert parallel; two pipeline stages, each with one model chunk
or with two that interleave. Models of 4 layers of TransformerEngine's or Megatron's own, the distributed optimizer. The
first step is recorded, every later one replayed.
"""

from typing import Any

import pytest

from tests.support.sample import name_of
from tests.support.trainings.gpus import DETERMINISTIC, GPUS, SIZES

LOCAL: dict[str, Any] = SIZES | {"local": True, "wrapper": "ddp", "dtype": "bf16"}
MOE: dict[str, Any] = {"experts": 4, "moe_shared_expert_intermediate_size": 256, "modules": ["attn", "moe_router"]}
DATA_PARALLEL: list[dict[str, Any]] = [
    {"dropout": 0.1, "microbatches": 2, "microbatches_later": 3},
    {"dtype": "fp32"},
    {"transformer_engine": False, "dropout": 0.1},
    {"overlap_param_gather": False},
    {"dropout": 0.1, "evaluates": True},
    {"gradient_accumulation_fusion": True, "microbatches": 2},
    {"recompute_modules": ["core_attn"]},
    {"recompute_modules": ["layernorm"], "microbatches": 2},
    {"dropout": 0.1, **MOE},
    {"recompute_modules": ["moe"], "microbatches": 2, **MOE},
    {"experts": 4, "moe_expert_capacity_factor": 1.0, "modules": [], "microbatches": 2},
    {"experts": 8, "moe_use_grouped_tensor": True, "modules": [], "microbatches": 2},
    {"dropout": 0.1, "mtp": 1, "microbatches": 2},
    {"fp8": "delayed", "microbatches": 2},
    {"fp8": "tensorwise", "microbatches": 2},
    {"fp8": "delayed", "microbatches": 2, "evaluates": True},
    {"fp8": "tensorwise", "microbatches": 2, "evaluates": True},
    {"dropout": 0.1, "control": "local_graphs_recorded_again"},
]
TENSOR_PARALLEL: list[dict[str, Any]] = [{"dropout": 0.1, "sequence_parallel": True, "microbatches": 2}]
EXPERT_PARALLEL: list[dict[str, Any]] = [{"dropout": 0.1, "microbatches": 2, **MOE}]
PIPELINE: list[dict[str, Any]] = [
    {"dropout": 0.1, "microbatches": 4},
    {"dropout": 0.1, "microbatches": 6, "microbatches_later": 3},
    {"microbatches": 3, **MOE},
    {"microbatches": 4, "fp8": "delayed"},
    {"virtual": 2, "dropout": 0.1, "microbatches": 4, "evaluates": True},
    {"virtual": 2, "microbatches": 4, **MOE},
]
SURVIVED: dict[str, Any] = {"dropout": 0.1, "control": "failed_local_capture"}
DEAD_REPLAY: dict[str, Any] = {"control": "dead_local_replay"}
# The options, the cases, and how many GPUs they need.
LAYOUTS: dict[str, tuple[list[str], list[dict[str, Any]], int]] = {
    "data parallel": ([], [*DATA_PARALLEL, SURVIVED, DEAD_REPLAY], 1),
    "TP2": (["--tp", "2"], TENSOR_PARALLEL, 2),
    "EP2": (["--ep", "2"], EXPERT_PARALLEL, 2),
    "PP2": (["--pp", "2"], PIPELINE, 2),
}
RUNS = [layout for layout in LAYOUTS if LAYOUTS[layout][2] <= max(GPUS, 1)]
EQUAL = [(layout, case) for layout in RUNS for case in LAYOUTS[layout][1] if case not in (SURVIVED, DEAD_REPLAY)]


@pytest.fixture(scope="module")
def results(compare_runs):
    """The results of each layout, by case; each layout in processes of its own."""
    found = {}
    for layout in RUNS:
        options, cases, _ = LAYOUTS[layout]
        compared = compare_runs([LOCAL | case for case in cases], *options, ranks=GPUS, environment=DETERMINISTIC)
        found[layout] = {name_of(case): result for case, result in zip(cases, compared, strict=True)}
    return found


@pytest.mark.parametrize(("layout", "case"), [pytest.param(*run, id=f"{run[0]}: {name_of(run[1])}") for run in EQUAL])
def test_graphs_train_bit_for_bit_as_eager(results, layout, case):
    result = results[layout][name_of(case)]
    assert not result["error"]
    assert result["differences"] == []
    in_a_layer = 2 if "moe_router" in case.get("modules", []) else 1
    in_a_stage = 2 * case["microbatches"] if layout == "PP2" else 4 + case.get("mtp", 0)
    assert result["graphs"] == in_a_layer * in_a_stage


def test_training_goes_on_eagerly_after_a_failed_capture(results):
    result = results["data parallel"][name_of(SURVIVED)]
    assert not result["error"]
    assert result["differences"] == []
    assert result["graphs"] == 0


def test_a_replay_that_does_nothing_changes_the_loss_of_the_second_step(results):
    differences = results["data parallel"][name_of(DEAD_REPLAY)]["differences"]
    assert any("losses[1]" in line for line in differences)
    assert not any("losses[0]" in line for line in differences)
