"""Train the same models several times, and name the first tensor that differs between two runs.

    python benchmarks/repeated_training.py --configurations D --variants eager+grouped native+grouped

See ``step_time.py`` for configurations and variants. Starts ``--launches`` concurrent torchrun jobs on the same GPUs to
vary the timing. Each trains every variant ``--runs`` times. Compares the loss and gradient norm of each step, and a
checksum of every gradient and weight of each rank. Variants that must be bit-identical (``Variant.references``) are
also compared with each other. The exit code is 1 if runs differ or fail. Without a GPU, tiny models train on the CPU
backend.
"""

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks._step_time import configurations, variants  # noqa: E402
from benchmarks._step_time.launch import Result, run_plan  # noqa: E402
from benchmarks._step_time.plan import Run, plan  # noqa: E402
from benchmarks.results_file import command_line, write_results  # noqa: E402

type Steps = list[dict[str, Any]]  # values of each step, by name


def steps_of(result: Result) -> Steps:
    """Return the values of each step that are compared: loss, gradient norm and checksums."""
    numbers = ({"loss": loss, "gradient norm": norm} for loss, norm in result["numbers"])
    return [step | sums for step, sums in zip(numbers, result["found"], strict=True)]


def first_difference(one: Steps, other: Steps) -> str:
    """Describe the first difference between two runs; empty if they are equal."""
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True), 1):
        names = [name for name in mine if mine[name] != theirs.get(name)]
        tensors = [name for name in names if "gradient of" in name] or names
        if names:
            return f"step {number}: {len(names)} of {len(mine)} values, for example {tensors[-1]}"
    return ""


def compared(runs: list[Result], reference: Result | None) -> dict[str, Any]:
    """Compare the runs of a variant with ``reference``.

    Returns:
        ``runs``, ``equal``, ``results``: Number of runs, number equal to the reference, number of distinct results.
        ``differences``: Error messages, then the first difference of each run that differs from the reference.
    """
    errors = [run["error"] for run in runs if "error" in run]
    trained = [steps_of(run) for run in runs if "error" not in run]
    found = [first_difference(steps_of(reference), steps) for steps in trained] if reference else []
    results = len({json.dumps(steps) for steps in trained})
    differences = [*errors, *filter(None, found)]
    return {"runs": len(runs), "equal": found.count(""), "results": results, "differences": differences}


def train(trained: list[tuple[Any, Any]], args: argparse.Namespace, ranks: int, folder: Path) -> list[Result]:
    """Train all pairs of configuration and variant in one launch, and return the results in order."""
    folder.mkdir(parents=True)
    runs = [replace(run, checksums=True) for run in plan(trained, steps=args.steps, profiled=False)]
    results: list[Result] = [{"error": "not run"} for _ in runs]

    def keep(run: Run, result: Result) -> None:
        results[run.number] = result

    on_cpu = not torch.cuda.is_available()
    run_plan(runs, ranks=ranks, on_cpu=on_cpu, logs=folder, stall_seconds=args.stall_seconds, show=keep)
    return results


def main() -> int:
    """Train and compare, print a line per variant, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="number of ranks (default: all GPUs; 2 on the CPU backend)")
    parser.add_argument("--configurations", nargs="+", default=["D"], metavar="NAME[:FLAGS]")
    parser.add_argument("--variants", nargs="+", required=True, metavar="NAME[:VARIABLES[:FLAGS]]")
    parser.add_argument("--launches", type=int, default=5, help="concurrent groups of processes")
    parser.add_argument("--runs", type=int, default=4, help="runs of each variant per launch")
    parser.add_argument("--steps", type=int, default=8, help="steps per run")
    parser.add_argument("--stall-seconds", type=float, default=240, help="time limit of a run")
    parser.add_argument("--logs", type=Path, help="folder for logs of each launch")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    ranks = args.gpus or torch.cuda.device_count() or 2
    on_cpu = not torch.cuda.is_available()
    options = {"ranks": ranks, "steps": args.steps, "on_cpu": on_cpu}
    named = [(text, configurations.configuration(text, **options)) for text in args.configurations]
    pairs = [(each, variants.variant(name)) for _, each in named for name in args.variants]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.launches) as pool:
        folders = [(args.logs or Path(temporary)).resolve() / str(number) for number in range(args.launches)]
        launches = list(pool.map(lambda folder: train(pairs * args.runs, args, ranks, folder), folders))
    found: dict[str, dict[str, Any]] = {}
    references: dict[Any, Result | None] = {}
    for index, (configuration, variant) in enumerate(pairs):
        runs = [result for results in launches for result in results[index :: len(pairs)]]
        same = configuration.name, variant.references[:1]
        if same not in references:
            references[same] = next((run for run in runs if "error" not in run), None)
        row = found.setdefault(configuration.name, {})[variant.name] = compared(runs, references[same])
        print(f"{configuration.name} {variant.name}: {row['equal']} of {row['runs']} equal, {row['results']} distinct")
        for difference in row["differences"][:2]:
            print("   ", difference[-1000:])
    if args.output:
        command = command_line("benchmarks/repeated_training.py", sys.argv[1:])
        write_results(args.output, command=command, gpus=ranks, steps=args.steps, results=found)
    return int(any(row["equal"] < row["runs"] for rows in found.values() for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
