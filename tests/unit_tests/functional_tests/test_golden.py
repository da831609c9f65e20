"""Test comparisons with golden values: exact on GPUs, with a tolerance on the CPU backend."""

import json
from dataclasses import replace

import pytest

from tests.functional_tests._runner import golden
from tests.functional_tests._runner.golden import differences, differences_from_golden
from tests.functional_tests._runner.recipe import CPU_BACKEND, Recipe
from tests.support.trainings.rounding import ROUNDING

METRICS: golden.Metrics = {
    "lm loss": {1: 3.0, 2: 2.1, 3: 2.0},
    "num-zeros": {1: 0.0, 2: 0.0, 3: 7.0},
    "lm loss validation": {2: 2.5},
    "mem-max-allocated-bytes": {1: 100.0, 2: 100.0, 3: 100.0},
    "iteration-time": {2: 9.0, 3: 1.0},
}


@pytest.fixture
def recipe(tmp_path):
    arguments = {"--train-iters": 3, "--cuda-graph-impl": "none"}
    recipe = Recipe("gpt/eager", "dgx_h100", 2, tmp_path / "golden_values.json", False, {}, arguments)
    golden.write(recipe.golden, METRICS)
    return recipe


def changed(name, step, value):
    return METRICS | {name: METRICS[name] | {step: value}}


def test_golden_values_keep_all_bits_in_megatrons_format(recipe):
    assert golden.read(recipe.golden) == METRICS
    exact = {"lm loss": {4: 1 / 3, 8: 0.1 + 0.2}}
    golden.write(recipe.golden, exact)
    assert golden.read(recipe.golden) == exact
    values = '"values": {"4": 0.3333333333333333, "8": 0.30000000000000004}'
    text = f'{{"lm loss": {{"start_step": 4, "end_step": 8, "step_interval": 4, {values}}}}}'
    assert json.dumps(json.loads(recipe.golden.read_text())) == text


def test_last_bit_counts_on_gpus(recipe):
    assert differences_from_golden(recipe, METRICS) == []
    found = changed("lm loss", 3, 2.0 + 2**-51)
    assert differences_from_golden(recipe, found) == ["lm loss 3: 2.0000000000000004, expected 2.0"]


def test_cpu_backend_tolerates_rounding_only(recipe):
    recipe = replace(recipe, platform=CPU_BACKEND)
    within = ROUNDING * recipe.steps
    assert differences_from_golden(recipe, changed("lm loss", 2, 2.1 * (1 + 0.9 * within))) == []
    for value in 2.1 * (1 + 1.1 * within), 2.1 * (1 - 1.1 * within), float("nan"):
        (line,) = differences_from_golden(recipe, changed("lm loss", 2, value))
        assert line.startswith("lm loss 2: ")
    assert differences_from_golden(recipe, changed("iteration-time", 3, 1000.0)) == []


def test_missing_values_and_metrics_are_differences():
    assert differences(METRICS | {"lm loss": {1: 3.0, 2: 2.1}}, METRICS) == ["lm loss 3: None, expected 2.0"]
    assert differences(changed("lm loss", 4, 2.0), METRICS) == ["lm loss 4: 2.0, expected None"]
    without = {name: values for name, values in METRICS.items() if name != "lm loss validation"}
    assert differences(without, METRICS) == ["lm loss validation 2: None, expected 2.5"]
    assert differences(METRICS, without) == []


@pytest.mark.parametrize(
    ("name", "allowed", "words"),
    [
        ("iteration-time", 2.0, "iteration-time 10.5 is more than 2.0 times the golden value 5"),
        ("mem-max-allocated-bytes", 1.2, "mem-max-allocated-bytes 126 is more than 1.2 times the golden value 100"),
    ],
)
def test_median_time_and_memory_are_bounded_on_gpus(recipe, name, allowed, words):
    def times(factor):
        return METRICS | {name: {step: value * factor for step, value in METRICS[name].items()}}

    assert differences_from_golden(recipe, times(0.95 * allowed)) == []
    assert differences_from_golden(recipe, times(1.05 * allowed)) == [words]


def test_other_versions_are_listed(recipe, monkeypatch):
    installed = {"torch": "2.11.0+cu130", "megatron-core": "0.19.2", "transformer-engine": "2.20.2"}
    monkeypatch.setattr(golden, "version", lambda package: installed[package])
    assert golden.other_versions(recipe) == []
    installed |= {"torch": "2.12.0", "transformer-engine": "2.19.0"}
    assert golden.other_versions(recipe) == [
        "torch 2.12.0, constraints.txt 2.11.0",
        "transformer-engine 2.19.0, constraints.txt 2.20.2",
    ]
    assert len(golden.other_versions(replace(recipe, platform=CPU_BACKEND))) == 1
