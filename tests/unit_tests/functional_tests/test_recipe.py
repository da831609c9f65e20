"""Test recipe lists and ``model_config.yaml`` files."""

import os
import sys

import pytest

pytest.importorskip("megatron.core")

from tests.functional_tests._runner import recipe
from tests.functional_tests._runner.recipe import CASES, CPU_BACKEND, find, specifications
from tests.support.ranks.on_cpu_backend import on_cpu_backend

LIST = """
spec: {model: gpt, gpus: 2}
products:
  - test_case: [eager, graphed]
    products: [{environment: [dev], platforms: [dgx_h100, cpu_backend]}]
  - model: [moe]
    gpus: [4]
    test_case: [eager]
    products: [{environment: [dev], platforms: [dgx_h100]}]
"""
EAGER = """
ENV_VARS: {A: 1}
TEST_TYPE: regular
MODEL_ARGS: {--train-iters: 8, --bf16: true, --lr: 1e-3, --cuda-graph-impl: none, --log: '${TENSORBOARD_PATH}'}
"""
GRAPHED = """
ENV_VARS: {}
TEST_TYPE: ckpt-resume
MODEL_ARGS: {--cuda-graph-modules: [attn, mlp], --save: '${CHECKPOINT_SAVE_PATH}', --load: '${CHECKPOINT_LOAD_PATH}',
             --train-iters: 6, --cuda-graph-impl: local}
"""
GPU_RECIPES = find([], "dgx_h100")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes the recipe list and the given ``model_config.yaml`` files."""

    def write_files(**files: str) -> None:
        (tmp_path / "lists/h100").mkdir(parents=True)
        (tmp_path / "lists/h100/list.yaml").write_text(LIST)
        for name in "gpt/eager", "gpt/graphed", "moe/eager":
            text = files.get(name.partition("/")[2])
            if text is not None:
                (tmp_path / name).mkdir(parents=True)
                (tmp_path / name / "model_config.yaml").write_text(text)

    monkeypatch.setattr(recipe, "TESTS", tmp_path)
    monkeypatch.setattr(recipe, "CASES", tmp_path)
    monkeypatch.setattr(recipe, "LISTS", tmp_path / "lists")
    return write_files


def test_products_are_combined_and_override_the_spec():
    products = [
        {"a": [1, 2], "products": [{"b": [3, 4]}, {"b": [5], "c": [6]}]},
        {"c": [7], "products": [{}]},
    ]
    assert [tuple(found.values()) for found in specifications({"spec": {"c": 0}, "products": products})] == [
        (0, 1, 3),
        (0, 1, 4),
        (0, 2, 3),
        (0, 2, 4),
        (6, 1, 5),
        (6, 2, 5),
        (7,),
    ]


def test_recipes_are_found_by_model_and_name(write, tmp_path):
    write(eager=EAGER, graphed=GRAPHED)
    assert [each.name for each in find([], "dgx_h100")] == ["gpt/eager", "gpt/graphed", "moe/eager"]
    assert [each.name for each in find(["moe", "gpt/graphed/"], "dgx_h100")] == ["moe/eager", "gpt/graphed"]
    assert [each.name for each in find(["gpt"], CPU_BACKEND)] == ["gpt/eager", "gpt/graphed"]
    (found,) = find(["moe"], "dgx_h100")
    assert (found.gpus, found.environment, found.resumes, found.graphed) == (4, {"A": "1"}, False, False)
    assert found.golden == tmp_path / "moe/eager/golden_values_dev_dgx_h100.json"
    with pytest.raises(ValueError, match="no recipe 'moe' for cpu_backend: use one of gpt/eager, gpt/graphed"):
        find(["moe"], CPU_BACKEND)


def test_arguments_become_a_command_line(write, tmp_path):
    write(eager=EAGER, graphed=GRAPHED)
    on_gpu, on_cpu = (find(["gpt/eager"], platform)[0] for platform in ("dgx_h100", CPU_BACKEND))
    flags = f"--train-iters 8 --bf16 --lr 1e-3 --cuda-graph-impl none --log {tmp_path}/tensorboard".split()
    (command,) = on_gpu.commands(tmp_path)
    assert command[-len(flags) - 3 :] == ["--nproc-per-node", "2", str(recipe.SCRIPT), *flags]
    (command,) = on_cpu.commands(tmp_path)
    assert command[-len(flags) - 3 : -len(flags) - 1] == ["-m", "megatron_fsdp_cuda_graphs.cpu_backend"]
    assert on_cpu.variables(tmp_path)["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in on_gpu.variables(tmp_path)
    assert on_gpu.shell(tmp_path).startswith("A=1 SCALARS_PATH=")


def test_resumed_recipe_saves_halfway_and_then_loads(write, tmp_path):
    write(eager=EAGER, graphed=GRAPHED)
    (found,) = find(["gpt/graphed"], "dgx_h100")
    first, second = ([*command[command.index("--cuda-graph-modules") :]] for command in found.commands(tmp_path))
    folders = f"--save {tmp_path}/checkpoint --load {tmp_path}/checkpoint"
    assert second == f"--cuda-graph-modules attn mlp {folders} --train-iters 6 --cuda-graph-impl local".split()
    assert first == [*second, "--exit-interval", "3"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no file gpt/eager/model_config.yaml: add it"),
        ("BASE: gpt/x\nMODEL_ARGS: {}", "keys are BASE, MODEL_ARGS; they must be ENV_VARS, MODEL_ARGS, TEST_TYPE"),
        (EAGER.replace("regular", "release"), "TEST_TYPE is 'release'"),
        (EAGER.replace("--train-iters", "--iters"), "--train-iters is missing"),
        (EAGER.replace("--cuda-graph-impl", "--impl"), "--cuda-graph-impl is missing"),
    ],
)
def test_invalid_recipe_is_named(write, text, words):
    write(eager=text, graphed=GRAPHED)
    with pytest.raises(ValueError) as error:
        find(["gpt/eager"], "dgx_h100")
    assert words in str(error.value)
    assert "gpt/eager" in str(error.value)


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
