"""Load recipes, each a ``model_config.yaml`` listed in ``tests/test_utils/recipes``."""

import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from string import Template
from typing import Any

import yaml

TESTS = Path(__file__).resolve().parents[2]
CASES = TESTS / "functional_tests/test_cases"
LISTS = TESTS / "test_utils/recipes"
# Writes TensorBoard's scalars to the file SCALARS_PATH.
SCRIPT = TESTS / "support/pretraining/pretrain_with_writers.py"
CPU_BACKEND = "cpu_backend"
REGULAR, RESUME = "regular", "ckpt-resume"


@dataclass(frozen=True)
class Recipe:
    """A training run on one platform.

    Attributes:
        name: Model and test case, for example ``gpt/gpt3_mcore_te_tp1_pp1_mfsdp``.
        platform: ``dgx_h100``, ``dgx_h200``, ... or ``cpu_backend``.
        gpus: Number of ranks.
        golden: File of the golden values.
        resumes: Stop training halfway and resume from a checkpoint.
        environment: Environment variables of the processes.
        arguments: Flags of ``megatron.training`` and their values; True for a flag without a value.
    """

    name: str
    platform: str
    gpus: int
    golden: Path
    resumes: bool
    environment: dict[str, str]
    arguments: dict[str, Any]

    @property
    def steps(self) -> int:
        """Total number of training steps."""
        return int(self.arguments["--train-iters"])

    @property
    def graphed(self) -> bool:
        """Whether the recipe captures CUDA graphs."""
        return self.arguments["--cuda-graph-impl"] != "none"

    def commands(self, folder: Path) -> list[list[str]]:
        """Return one command per training run (two runs if the recipe resumes), with output paths in ``folder``."""
        runs = [self.arguments]
        if self.resumes:
            runs.insert(0, self.arguments | {"--exit-interval": self.steps // 2})
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.gpus)]
        if self.platform == CPU_BACKEND:
            command += ["-m", "megatron_fsdp_cuda_graphs.cpu_backend"]
        return [[*command, str(SCRIPT), *_flags(arguments, folder)] for arguments in runs]

    def variables(self, folder: Path) -> dict[str, str]:
        """Return the environment variables of the training runs, with output paths in ``folder``."""
        files = {"SCALARS_PATH": str(folder / "scalars"), "STEP_METRICS_PATH": str(folder / "steps")}
        path = os.pathsep.join(filter(None, [str(TESTS.parent), os.environ.get("PYTHONPATH")]))
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.platform == CPU_BACKEND else {}
        return self.environment | hidden | files | {"PYTHONPATH": path}

    def shell(self, folder: Path) -> str:
        """Return the training runs as lines of a shell script."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables(folder).items()]
        return "\n".join(" ".join([*variables, shlex.join(command)]) for command in self.commands(folder))


def _flags(arguments: dict[str, Any], folder: Path) -> list[str]:
    """Return the arguments as a command line, with output paths in ``folder``."""
    paths = {"TENSORBOARD_PATH": folder / "tensorboard"}
    paths |= dict.fromkeys(("CHECKPOINT_SAVE_PATH", "CHECKPOINT_LOAD_PATH"), folder / "checkpoint")
    words: list[str] = []
    for flag, value in arguments.items():
        given = value if isinstance(value, list) else [value]
        words += [flag, *(Template(str(each)).substitute(paths) for each in given if each is not True)]
    return words


def find(given: Iterable[str], platform: str) -> list[Recipe]:
    """Return the recipes of ``platform`` whose model or name is in ``given``; return all if ``given`` is empty.

    Raises:
        ValueError: A name is unknown, or a ``model_config.yaml`` is invalid.
    """
    recipes = {recipe.name: recipe for recipe in _listed(platform)}
    names: dict[str, None] = {}
    for text in given:
        found = [name for name in recipes if text.rstrip("/") in (name, name.partition("/")[0])]
        if not found:
            raise ValueError(f"there is no recipe {text!r} for {platform}: use one of {', '.join(recipes) or 'none'}")
        names |= dict.fromkeys(found)
    return [recipes[name] for name in names or recipes]


def _listed(platform: str) -> Iterator[Recipe]:
    """Yield the recipes for ``platform`` from all recipe lists."""
    for file in sorted(LISTS.glob("*/*.yaml")):
        for spec in specifications(yaml.safe_load(file.read_text())):
            if spec["platforms"] == platform:
                yield _load(spec)


def specifications(recipes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the specifications of a recipe list: ``spec`` updated with each combination of values in ``products``."""
    for block in recipes["products"]:
        for inner in block["products"]:
            keys = {key: values for key, values in (block | inner).items() if key != "products"}
            for values in product(*keys.values()):
                yield recipes["spec"] | dict(zip(keys, values, strict=True))


def _load(spec: dict[str, Any]) -> Recipe:
    name = f"{spec['model']}/{spec['test_case']}"
    file = CASES / name / "model_config.yaml"
    if not file.is_file():
        raise ValueError(f"the recipe list has {name}, but there is no file {file.relative_to(TESTS)}: add it")
    config = yaml.safe_load(file.read_text())
    expected = {"ENV_VARS", "TEST_TYPE", "MODEL_ARGS"}
    if set(config) != expected:
        raise ValueError(f"{name}: the keys are {', '.join(config)}; they must be {', '.join(sorted(expected))}")
    if config["TEST_TYPE"] not in (REGULAR, RESUME):
        raise ValueError(f"{name}: TEST_TYPE is {config['TEST_TYPE']!r}: set it to {REGULAR} or {RESUME}")
    for flag in "--train-iters", "--cuda-graph-impl":
        if flag not in config["MODEL_ARGS"]:
            raise ValueError(f"{name}: {flag} is missing: add it to MODEL_ARGS")
    return Recipe(
        name=name,
        platform=spec["platforms"],
        gpus=spec["gpus"],
        golden=file.with_name(f"golden_values_{spec['environment']}_{spec['platforms']}.json"),
        resumes=config["TEST_TYPE"] == RESUME,
        environment={variable: str(value) for variable, value in config["ENV_VARS"].items()},
        arguments=config["MODEL_ARGS"],
    )
