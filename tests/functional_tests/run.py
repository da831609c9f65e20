"""Train recipes in Megatron-LM's format and compare them with their golden values.

    python tests/functional_tests/run.py                    # all recipes for this machine
    python tests/functional_tests/run.py moe gpt/NAME       # a model and a recipe
    python tests/functional_tests/run.py --record           # write golden values
    python tests/functional_tests/run.py --dry-run --platform dgx_h100  # print the commands

A recipe is a folder ``test_cases/MODEL/NAME`` with a ``model_config.yaml``; ``tests/test_utils/recipes`` lists its
platforms and its number of GPUs. Without a GPU, the recipes of the CPU backend run.

With the versions of ``constraints.txt``, losses, gradient norms and numbers of zeros must be bit-identical to the
golden values of a GPU; step time and memory have bounds. On the CPU backend, rounding depends on the processor, so
these golden values have a tolerance (``tests/support/trainings/rounding.py``).
``tests/integration_tests/test_recipes.py`` compares graphed recipes with their eager twins, bit for bit.

The exit code is 1 if a recipe fails, or if none was compared or recorded.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.functional_tests._runner import golden
from tests.functional_tests._runner.recipe import CPU_BACKEND, Recipe, find

METRICS = (*golden.NUMBERS, *golden.BOUNDS)
MEMORY = ("mem-allocated-bytes", "mem-max-allocated-bytes")  # 0 on the CPU backend
LOG_LINES = 30


def this_platform() -> str:
    """Return the platform of this machine, for example ``dgx_h100`` for 'NVIDIA H100 80GB HBM3'."""
    if not torch.cuda.is_available():
        return CPU_BACKEND
    model = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0]
    return "dgx_" + re.sub(r"\W+", "_", model.lower())


def train(recipe: Recipe, folder: Path, seconds: float = 300) -> golden.Metrics:
    """Train a recipe and return its ``METRICS``, without memory on the CPU backend.

    Args:
        recipe: The recipe.
        folder: Existing empty folder for outputs.
        seconds: Time limit of a training run.

    Raises:
        RuntimeError: A training run failed, or its number of CUDA graphs or steps is wrong.
    """
    environment = os.environ | recipe.variables(folder)
    # One hardware queue would serialize FSDP's collectives and the kernels of layers.
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    log = folder / "log"
    for command in recipe.commands(folder):
        with log.open("a") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired as late:
            raise RuntimeError(f"not finished after {seconds:.0f} s\n{_end(log)}") from late
        finally:
            process.terminate()  # torchrun forwards it to its ranks
            process.wait()
        if code:
            raise RuntimeError(f"exit code {code}\n{_end(log)}")
    graphs = json.loads((folder / "steps").read_text().splitlines()[-1])["graphs"]
    if (graphs > 0) != recipe.graphed:
        raise RuntimeError(f"{graphs} CUDA graphs with --cuda-graph-impl {recipe.arguments['--cuda-graph-impl']}")
    metrics: golden.Metrics = defaultdict(dict)
    for line in (folder / "scalars").read_text().splitlines():
        _, name, value, step = json.loads(line)
        if name in METRICS:
            metrics[name][step] = value
    if len(metrics["lm loss"]) != recipe.steps:
        raise RuntimeError(f"{len(metrics['lm loss'])} steps instead of {recipe.steps}\n{_end(log)}")
    unmeasured = MEMORY if recipe.platform == CPU_BACKEND else ()
    return {name: values for name in METRICS if (values := metrics[name]) and name not in unmeasured}


def _end(log: Path) -> str:
    """Return the end of a log, up to torchrun's own report."""
    lines = log.read_text(errors="replace").splitlines()
    ends = (number for number, line in enumerate(lines) if "torch/distributed/elastic" in line)
    return "\n".join(lines[: next(ends, None)][-LOG_LINES:])


def compare(recipe: Recipe, metrics: golden.Metrics) -> tuple[bool, list[str]]:
    """Return whether ``metrics`` were compared with golden values, and the differences or the reason why not."""
    if others := golden.other_versions(recipe):
        return False, [f"not compared with golden values: {'; '.join(others)}"]
    try:
        return True, golden.differences_from_golden(recipe, metrics)
    except FileNotFoundError:
        return False, [f"there is no {recipe.golden.name}: --record writes it"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the recipes, print each result and its differences, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="a model or MODEL/NAME (default: all)")
    parser.add_argument("--record", action="store_true", help="write golden values instead of comparing")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and train nothing")
    parser.add_argument("--platform", default=this_platform(), help="with --dry-run: platform of the commands")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="new folder for logs and checkpoints")
    args = parser.parse_args(arguments)
    try:
        recipes = find(args.recipes, args.platform)
    except ValueError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    passed, failed = 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        for recipe in recipes:
            folder = (args.logs or Path(temporary)).resolve() / recipe.name
            if args.dry_run:
                print(f"# {recipe.name}\n{recipe.shell(folder)}")
                continue
            if recipe.gpus > torch.cuda.device_count() and recipe.platform != CPU_BACKEND:
                print(f"{recipe.name}: not run: needs {recipe.gpus} GPUs, {torch.cuda.device_count()} are visible")
                continue
            folder.mkdir(parents=True)
            try:
                metrics = train(recipe, folder)
            except RuntimeError as error:
                compared, lines = True, [str(error)]
            else:
                compared, lines = (True, []) if args.record else compare(recipe, metrics)
                if args.record:
                    golden.write(recipe.golden, metrics)
            verdict = ("FAILED" if lines else "passed") if compared else "not compared"
            print("\n    ".join([f"{recipe.name}: {verdict}", *lines]), flush=True)
            passed, failed = passed + (verdict == "passed"), failed + (verdict == "FAILED")
    return int(not args.dry_run and (failed > 0 or passed == 0))


if __name__ == "__main__":
    sys.exit(main())
