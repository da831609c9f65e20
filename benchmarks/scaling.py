"""How the cost of a step grows with layers and with micro-batches: time, host time, memory, capture, CUDA API calls.

    python benchmarks/scaling.py --gpus 2 --output scaling.json

Models of configuration B of ``step_time.py`` (hidden 1024, sequence 512; tiny ones on the CPU backend, whose times mean
nothing), by default eager and with graphs: each number of layers with the first number of micro-batches, and
each number of micro-batches with the first number of layers. All of them run one after the other in the same processes
and must compute the same bits as the reference, as in ``step_time.py``. Besides a table it says what a layer costs, and
whether memory grows with micro-batches.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks._step_time import configurations, growth, report, variants  # noqa: E402
from benchmarks._step_time.launch import run_plan  # noqa: E402
from benchmarks._step_time.plan import MIN_STEPS, Run, plan  # noqa: E402
from benchmarks._step_time.results import Results  # noqa: E402
from benchmarks.results_file import command_line, write_results  # noqa: E402

CPU_NOTE = "CPU backend: these times and sizes say nothing about GPUs."


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments.

    Raises:
        SystemExit: they are wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="ranks (default: all GPUs; 2 on the CPU backend)")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4], help="in each step of a rank")
    parser.add_argument("--all-pairs", action="store_true", help="each number of layers with each of micro-batches")
    parser.add_argument("--variants", nargs="+", default=["eager", "native"], metavar="NAME[:VARIABLES[:FLAGS]]")
    parser.add_argument("--steps", type=int, default=20, help="timed steps; times are of their second half")
    parser.add_argument("--no-profile", action="store_true", help="no host time, no CUDA API calls")
    parser.add_argument("--stall-seconds", type=float, default=240, help="a run that takes longer has failed")
    parser.add_argument("--logs", type=Path, help="folder for logs, traces and lists of functions")
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    args = parser.parse_args(arguments)
    if args.steps < MIN_STEPS:
        parser.error(f"--steps must be at least {MIN_STEPS}")
    return args


def sizes(layers: list[int], micro_batches: list[int], *, all_pairs: bool) -> list[tuple[int, int]]:
    """Return the models to train, as numbers of layers and of micro-batches."""
    pairs = [(one, many) for many in micro_batches for one in layers]
    return [pair for pair in pairs if all_pairs or pair[0] == layers[0] or pair[1] == micro_batches[0]]


class Scaling:
    """Trains the models of a command line.

    Args:
        args: The command line's.
        on_cpu: Whether there is no GPU.
    """

    def __init__(self, args: argparse.Namespace, *, on_cpu: bool):
        self.args, self.on_cpu = args, on_cpu
        self.ranks: int = args.gpus or (2 if on_cpu else torch.cuda.device_count())
        options = {"ranks": self.ranks, "steps": args.steps, "expert_parallel": 1, "on_cpu": on_cpu}
        self._variants = [variants.variant(text) for text in args.variants]
        self._sizes: dict[str, tuple[int, int]] = {}
        self._configurations = []
        for layers, micro_batches in sizes(args.layers, args.micro_batches, all_pairs=args.all_pairs):
            text = f"B:--num-layers {layers} --global-batch-size {micro_batches * self.ranks}"
            self._configurations.append(configurations.configuration(text, **options))
            self._sizes[text] = layers, micro_batches
        self._results = Results(dict.fromkeys(self._sizes, self._variants))

    def run(self, logs: Path) -> None:
        """Train all models in one launch."""
        trained = [(each, variant) for each in self._configurations for variant in self._variants]
        runs = plan(trained, steps=self.args.steps, profiled=not self.args.no_profile, top_python=40)

        def keep(run: Run, result: dict[str, Any]) -> None:
            self._results.keep(run, result, len(runs))
            self.write()

        run_plan(
            runs, ranks=self.ranks, on_cpu=self.on_cpu, logs=logs, stall_seconds=self.args.stall_seconds, show=keep
        )

    def rows(self) -> list[dict[str, Any]]:
        """What is reported of each model and variant."""
        found = self._results.rows()
        return [growth.row(row, *self._sizes[name]) for name, rows in found.items() for row in rows]

    def write(self) -> None:
        """Write what was found so far."""
        if self.args.output:
            self.args.output.parent.mkdir(parents=True, exist_ok=True)
            rows = self.rows()
            note: dict[str, Any] = {"note": CPU_NOTE} if self.on_cpu else {}
            write_results(
                self.args.output,
                command=command_line("benchmarks/scaling.py", sys.argv[1:]),
                gpus=self.ranks,
                **note,
                models=rows,
                a_layer_costs=growth.with_layers(rows),
                memory_with_micro_batches=growth.with_micro_batches(rows),
            )


def main() -> int:
    """Run what was chosen, print and write what was found."""
    args = parse()
    scaling = Scaling(args, on_cpu=not torch.cuda.is_available())
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        scaling.run(logs.resolve())
    rows = scaling.rows()
    print(CPU_NOTE if scaling.on_cpu else f"{scaling.ranks} x {torch.cuda.get_device_name()}")
    print(growth.table(rows))
    print(*growth.sentences(rows), sep="\n")
    return int(any(report.failures(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
