"""Test recipe lists and ``model_config.yaml`` files."""

import os
import sys

import pytest

pytest.importorskip("megatron.core")

from tests.functional_tests._runner import recipe
from tests.functional_tests._runner.recipe import CASES, CPU_BACKEND, find
from tests.support.ranks.on_cpu_backend import on_cpu_backend

GPU_RECIPES = find([], "dgx_h100")


def test_every_committed_recipe_is_listed_once():
    listed = [each.name for platform in ("dgx_h100", CPU_BACKEND) for each in find([], platform)]
    assert sorted(listed) == sorted(str(file.parent.relative_to(CASES)) for file in CASES.glob("*/*/model_config.yaml"))
    assert {each.name for each in find([], "dgx_h200")} == {each.name for each in GPU_RECIPES}


@pytest.fixture(scope="module")
def _cpu_backend():
    with on_cpu_backend(), pytest.MonkeyPatch.context() as environment:
        environment.setenv("RANK", "0")
        environment.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        yield


@pytest.mark.sampled
@pytest.mark.parametrize("gpu_recipe", GPU_RECIPES, ids=lambda each: each.name)
@pytest.mark.usefixtures("_cpu_backend")
def test_megatron_accepts_the_flags_of_gpu_recipes(gpu_recipe, monkeypatch, tmp_path):
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training.arguments import parse_args, validate_args

    monkeypatch.setenv("WORLD_SIZE", str(gpu_recipe.gpus))
    command = gpu_recipe.commands(tmp_path)[-1]
    monkeypatch.setattr(sys, "argv", command[command.index(str(recipe.SCRIPT)) :])
    args = validate_args(parse_args())
    unset_num_microbatches_calculator()
    assert args.cuda_graph_impl == gpu_recipe.arguments["--cuda-graph-impl"]
    assert args.train_iters == gpu_recipe.steps
    assert args.tensorboard_dir == os.fspath(tmp_path / "tensorboard")
