"""Measure how step time, memory and capture time grow with the numbers of layers and micro-batches.

    python benchmarks/scaling.py --gpus 2 --output scaling.json

Trains models of configuration B of ``step_time.py`` (hidden 1024, sequence 512; tiny models on the CPU backend, whose
times are meaningless) in the same processes: each value of ``--layers`` with the first of ``--micro-batches``, and each
value of ``--micro-batches`` with the first of ``--layers``. As in ``step_time.py``, steps must be bit-identical to the
reference.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks._step_time import configurations, report, variants  # noqa: E402
from benchmarks._step_time.launch import run_plan  # noqa: E402
from benchmarks._step_time.plan import MIN_STEPS, Run, plan  # noqa: E402
from benchmarks._step_time.results import Results  # noqa: E402
from benchmarks.results_file import command_line, write_results  # noqa: E402

CPU_NOTE = "CPU backend: these times and sizes do not apply to GPUs."
COLUMNS: report.Columns = (
    ("layers", ("layers",)),
    ("micro-b.", ("micro_batches",)),
    ("ms", ("ms",)),
    ("/eager", ("ratio_to_eager",)),
    ("host ms", ("profile", "host_ms")),
    ("alloc MiB", ("max_allocated_mib",)),
    ("res. MiB", ("max_reserved_mib",)),
    ("capture s", ("capture_seconds",)),
    ("graphs", ("graphs",)),
    ("python", ("profile", "python_calls")),
)


def parse() -> argparse.Namespace:
    """Parse the command line.

    Raises:
        SystemExit: An argument is invalid.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="number of ranks (default: all GPUs; 2 on the CPU backend)")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4], help="numbers per step and rank")
    parser.add_argument("--variants", nargs="+", default=["eager", "native"], metavar="NAME[:VARIABLES[:FLAGS]]")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run; times are from the second half")
    parser.add_argument("--no-profile", action="store_true", help="skip host time and Python calls")
    parser.add_argument("--stall-seconds", type=float, default=240, help="time limit of a run")
    parser.add_argument("--logs", type=Path, help="folder for logs, traces and lists of functions")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    if args.steps < MIN_STEPS:
        parser.error(f"--steps {args.steps}: pass at least {MIN_STEPS}")
    return args


def main() -> int:
    """Train all models in one launch, and print a table."""
    args, on_cpu = parse(), not torch.cuda.is_available()
    ranks: int = args.gpus or (2 if on_cpu else torch.cuda.device_count())
    options = {"ranks": ranks, "steps": args.steps, "expert_parallel": 1, "on_cpu": on_cpu}
    chosen = [variants.variant(text) for text in args.variants]
    sizes: dict[str, dict[str, int]] = {}
    trained = []
    for layers, many in dict.fromkeys(
        [*((each, args.micro_batches[0]) for each in args.layers), *((args.layers[0], n) for n in args.micro_batches)]
    ):
        text = f"B:--num-layers {layers} --global-batch-size {many * ranks}"
        sizes[text] = {"layers": layers, "micro_batches": many}
        trained += [(configurations.configuration(text, **options), variant) for variant in chosen]
    results = Results(dict.fromkeys(sizes, chosen))
    runs = plan(trained, steps=args.steps, profiled=not args.no_profile)

    def rows() -> list[dict[str, Any]]:
        return [sizes[name] | row for name, found in results.rows().items() for row in found]

    def keep(run: Run, result: dict[str, Any]) -> None:
        results.keep(run, result, len(runs))
        if args.output:
            note: dict[str, Any] = {"note": CPU_NOTE} if on_cpu else {}
            command = command_line("benchmarks/scaling.py", sys.argv[1:])
            write_results(args.output, command=command, gpus=ranks, **note, models=rows())

    with tempfile.TemporaryDirectory() as folder:
        logs = (args.logs or Path(folder)).resolve()
        logs.mkdir(parents=True, exist_ok=True)
        run_plan(runs, ranks=ranks, on_cpu=on_cpu, logs=logs, stall_seconds=args.stall_seconds, show=keep)
    print(CPU_NOTE if on_cpu else f"{ranks} x {torch.cuda.get_device_name()}")
    print(report.table(rows(), COLUMNS))
    return int(any(report.failures(row) for row in rows()))


if __name__ == "__main__":
    sys.exit(main())
