"""Test that CPU-backend recipes match eager runs and golden values, and that deviations are detected."""

import dataclasses
import json
from typing import Any

import pytest

from tests.functional_tests import run
from tests.functional_tests._runner.case import load
from tests.functional_tests._runner.machine import CPU_BACKEND
from tests.support.sample import asked

GOLDEN = f"golden_values_{CPU_BACKEND}.json"
GPT = "gpt_cpu_backend"
EAGER = f"{GPT}/fsdp_eager"
PASSING = [
    *(f"{GPT}/{name}" for name in ("fsdp_whole_layers", "fsdp_resume", "fsdp_resume_eager", "fsdp_pp2_whole_chunks")),
    "hybrid_cpu_backend/fsdp_whole_model",
    "moe_cpu_backend/fsdp_grouped",
]
# Changed flags, and the first step whose loss differs
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another_seed": ({"--seed": 1235}, "1"),
    "another_learning_rate": ({"--lr": 1.01e-3}, "2"),
}


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ended(request, tmp_path_factory):
    """Return the exit status and the results by case; compare ``CHANGES`` with the golden values of ``EAGER``."""
    output = tmp_path_factory.mktemp("functional") / "results.json"
    eager = load(EAGER)
    names = [name for (name,) in asked(request, "name")]
    changed = [
        dataclasses.replace(eager, name=f"{GPT}/{name}", arguments=eager.arguments | CHANGES[name][0])
        for name in names
        if name in CHANGES
    ]
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(run, "find", lambda names: [*map(load, names), *changed])
        status = run.main([*(name for name in names if name in PASSING), "--output", str(output)])
    return status, {result["case"]: result for result in json.loads(output.read_text())["results"]}


@pytest.mark.parametrize("name", PASSING)
def test_recipe_equals_its_eager_one_and_golden_values(ended, name):
    result = ended[1][name]
    assert result["differences"] == [] and result["notes"] == []
    assert result["compared with"] == [case for case in (load(name).equals, GOLDEN) if case]
    assert result["passed"]


@pytest.mark.parametrize("name", CHANGES)
def test_changed_training_fails_at_its_first_changed_loss(ended, name):
    status, results = ended
    result = results[f"{GPT}/{name}"]
    assert status == 1 and not result["passed"]
    assert result["differences"][0].startswith(f"lm loss {CHANGES[name][1]}: ")
