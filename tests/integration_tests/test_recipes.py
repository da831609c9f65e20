"""Test that graphed recipes are bit-identical to eager recipes, in golden values and in training."""

import pytest

from tests.functional_tests import run
from tests.functional_tests._runner import golden
from tests.functional_tests._runner.recipe import CASES, find

GPT, CPU = "gpt/gpt3_mcore_te", "cpu_backend/gpt3_mcore"
MOE, CPU_MOE = "moe/gpt3_moe_mcore_te_tp1_pp1", "cpu_backend/gpt3_moe_mcore_tp1_pp1_mfsdp"
HYBRID = "hybrid/hybrid_mcore_te_tp1_pp1_mfsdp"
# A graphed recipe and its eager twin
PAIRS = [
    (f"{GPT}_tp1_pp1_mfsdp_te_graphs", f"{GPT}_tp1_pp1_mfsdp"),
    (f"{GPT}_tp1_pp1_mfsdp_te_graphs_per_layer", f"{GPT}_tp1_pp1_mfsdp"),
    (f"{GPT}_tp1_pp1_mfsdp_te_graphs_resume", f"{GPT}_tp1_pp1_mfsdp"),
    (f"{GPT}_tp1_pp1_mfsdp_eval_te_graphs", f"{GPT}_tp1_pp1_mfsdp_eval"),
    (f"{GPT}_tp1_pp1_mfsdp_fp8_te_graphs", f"{GPT}_tp1_pp1_mfsdp_fp8"),
    (f"{GPT}_tp2_pp1_mfsdp_te_graphs", f"{GPT}_tp2_pp1_mfsdp"),
    (f"{GPT}_tp1_pp2_vp2_mfsdp_mtp_te_graphs", f"{GPT}_tp1_pp2_vp2_mfsdp_mtp"),
    (f"{GPT}_tp1_pp1_cp2_mfsdp_te_graphs", f"{GPT}_tp1_pp1_cp2_mfsdp"),
    (f"{MOE}_mfsdp_te_graphs_attn_router", f"{MOE}_mfsdp"),
    (f"{MOE}_ep2_mfsdp_te_graphs", f"{MOE}_ep2_mfsdp"),
    (f"{HYBRID}_te_graphs", HYBRID),
    (f"{CPU}_tp1_pp1_mfsdp_te_graphs", f"{CPU}_tp1_pp1_mfsdp"),
    (f"{CPU}_tp1_pp1_mfsdp_te_graphs_per_layer", f"{CPU}_tp1_pp1_mfsdp"),
    (f"{CPU}_tp1_pp1_mfsdp_te_graphs_resume", f"{CPU}_tp1_pp1_mfsdp"),
    (f"{CPU}_tp1_pp2_vp2_mfsdp_te_graphs", f"{CPU}_tp1_pp2_vp2_mfsdp"),
    (f"{CPU_MOE}_te_graphs", CPU_MOE),
]
EVERY = {recipe.name: recipe for platform in ("dgx_h100", "cpu_backend") for recipe in find([], platform)}
HERE = {recipe.name: recipe for recipe in find([], run.this_platform())}
TRAINED_HERE = [pair for pair in PAIRS if pair[0] in HERE]
GOLDEN = [
    pytest.param(file, CASES / eager / file.name, id=f"{graphed} {file.stem}")
    for graphed, eager in PAIRS
    for file in sorted((CASES / graphed).glob("golden_values_*.json"))
]


def test_every_graphed_recipe_has_an_eager_twin():
    assert {name for name, recipe in EVERY.items() if recipe.graphed} == {graphed for graphed, _ in PAIRS}
    assert not any(EVERY[eager].graphed for _, eager in PAIRS)


@pytest.mark.parametrize(("graphed", "eager"), PAIRS)
def test_twins_differ_in_graphs_only(graphed, eager):
    graphed, eager = EVERY[graphed], EVERY[eager]
    own = "--cuda-graph-", *(("--save", "--load") if graphed.resumes else ())
    kept, expected = (
        {flag: value for flag, value in recipe.arguments.items() if not flag.startswith(own)}
        for recipe in (graphed, eager)
    )
    assert kept == expected
    assert (graphed.gpus, graphed.environment) == (eager.gpus, eager.environment)


@pytest.mark.parametrize(("graphed", "eager"), GOLDEN)
def test_golden_values_equal_those_of_the_eager_twin(graphed, eager):
    graphed, eager = golden.read(graphed), golden.read(eager)
    assert golden.differences(graphed, eager) == []
    assert graphed.keys() == eager.keys()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains a recipe and caches its metrics."""
    metrics: dict[str, golden.Metrics] = {}

    def train(name: str) -> golden.Metrics:
        if name not in metrics:
            metrics[name] = run.train(HERE[name], tmp_path_factory.mktemp("recipe"))
        return metrics[name]

    return train


@pytest.mark.long
@pytest.mark.parametrize(("graphed", "eager"), TRAINED_HERE)
def test_training_equals_the_eager_twin_and_golden_values(trained, graphed, eager):
    assert golden.differences(trained(graphed), trained(eager)) == []
    assert run.compare(HERE[graphed], trained(graphed)) == (True, [])
