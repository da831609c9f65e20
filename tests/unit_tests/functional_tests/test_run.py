"""Test training runs, output, files and exit codes of the runner."""

import sys

import pytest
import torch

from tests.functional_tests import run
from tests.functional_tests._runner import golden
from tests.functional_tests._runner.recipe import Recipe

# Stands in for a launch of two steps: writes scalars and graph counts, and the losses of its arguments.
LAUNCH = """
import json, os, sys
print("rank 0: output")
first, graphs, *losses = map(float, sys.argv[1:])
values = {"grad-norm": 1.5, "mem-allocated-bytes": 2e6, "mem-max-allocated-bytes": 3e6, "iteration-time": 0.25}
with open(os.environ["SCALARS_PATH"], "a") as file:
    for step, loss in enumerate(losses, int(first)):
        for name, value in ({"lm loss": loss, "learning-rate": 1.0} | values).items():
            print(json.dumps(["tensorboard", name, value, step]), file=file)
with open(os.environ["STEP_METRICS_PATH"], "w") as file:
    print(json.dumps({"graphs": int(graphs)}), file=file)
sys.exit(not losses)
"""
EAGER, GRAPHED = "gpt/eager", "gpt/graphed"


@pytest.fixture(params=["dgx_h100", "cpu_backend"])
def runner(request, tmp_path, monkeypatch):
    on_gpu = request.param == "dgx_h100"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 if on_gpu else 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(golden, "other_versions", lambda recipe: [])

    def call(*arguments: str, eager=(2.5, 2.0), graphed=(2.5, 2.0), graphs=4, gpus=2, resumes=False) -> int:
        """Run ``main`` with fake launches that log the losses ``eager`` or ``graphed``; return the exit code."""

        def recipe(name: str, impl: str) -> Recipe:
            file = tmp_path / f"{name.replace('/', '-')}.json"
            flags = {"--train-iters": 2, "--cuda-graph-impl": impl}
            return Recipe(name, run.this_platform(), gpus, file, False, {}, flags)

        def commands(recipe: Recipe, folder) -> list[list[str]]:
            losses = [*map(str, graphed if recipe.graphed else eager)]
            captured = str(graphs if recipe.graphed else 0)
            launch = [sys.executable, "-c", LAUNCH]
            if resumes:
                return [[*launch, str(step), captured, loss] for step, loss in enumerate(losses, 1)]
            return [[*launch, "1", captured, *losses]]

        recipes = [recipe(EAGER, "none"), recipe(GRAPHED, "transformer_engine")]
        monkeypatch.setattr(run, "find", lambda given, platform: [each for each in recipes if each.name in given])
        monkeypatch.setattr(Recipe, "commands", commands)
        return run.main(list(arguments))

    return call


def test_recorded_values_match_the_same_run_only(runner, capsys):
    assert runner(EAGER, GRAPHED, "--record") == 0
    assert runner(EAGER, GRAPHED) == 0
    assert runner(EAGER, GRAPHED, resumes=True) == 0
    assert capsys.readouterr().out == f"{EAGER}: passed\n{GRAPHED}: passed\n" * 3
    assert runner(EAGER, GRAPHED, graphed=(2.5, 1.0)) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{EAGER}: passed",
        f"{GRAPHED}: FAILED",
        "    lm loss 2: 1.0, expected 2.0",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"graphed": ()}, "exit code 1\nrank 0: output"),
        ({"graphed": (2.5,)}, "1 steps instead of 2\nrank 0: output"),
        ({"graphs": 0}, "0 CUDA graphs with --cuda-graph-impl transformer_engine"),
    ],
)
def test_failed_training_is_not_recorded(runner, capsys, tmp_path, arguments, words):
    assert runner(GRAPHED, "--record", **arguments) == 1
    assert f"{GRAPHED}: FAILED\n    {words}" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.json"))


def test_recipes_without_comparison_fail(runner, capsys, monkeypatch):
    assert runner(EAGER) == 1
    assert f"{EAGER}: not compared\n    there is no gpt-eager.json: --record writes it" in capsys.readouterr().out
    monkeypatch.setattr(golden, "other_versions", lambda recipe: ["torch 9, constraints.txt 2"])
    assert runner(EAGER) == 1
    assert "not compared with golden values: torch 9, constraints.txt 2" in capsys.readouterr().out
    if torch.cuda.is_available():
        assert runner(EAGER, gpus=4) == 1
        assert capsys.readouterr().out == f"{EAGER}: not run: needs 4 GPUs, 2 are visible\n"


def test_dry_run_prints_the_commands_of_another_platform(capsys, monkeypatch):
    name = "gpt/gpt3_mcore_te_tp1_pp1_mfsdp_te_graphs_resume"
    monkeypatch.setattr(run, "train", None)
    assert run.main(["--dry-run", "--platform", "dgx_h100", name]) == 0
    title, first, second = capsys.readouterr().out.splitlines()
    assert title == f"# {name}"
    assert first.endswith(" --exit-interval 8") and "--load" in second
    assert "--nproc-per-node 2" in second and "cpu_backend" not in second
    assert run.main(["--dry-run", "--platform", "dgx_h100", "gpt/none"]) == 2
    assert "there is no recipe 'gpt/none' for dgx_h100" in capsys.readouterr().err
