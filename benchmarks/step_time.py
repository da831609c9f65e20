"""Compare training step times: Megatron-FSDP eager, with graphs and with a full-iteration graph.

    python benchmarks/step_time.py --gpus 2 --train A eager native --train B --output step_time.json

Configurations, trained by ``examples/pretrain_gpt.py`` in bf16 with micro-batches of one sequence:
    A  16 layers, hidden 2048, sequence 2048
    B   8 layers, hidden 1024, sequence 512: host-bound
    C   8 layers, hidden 2048, sequence 2048, 8 experts, top-2, a shared expert
    D   4 layers, hidden 1024, sequence 512, architecture of DeepSeek-V3
    llama-3.2-3b   28 layers, hidden 3072, sequence 4096
    llama-3.1-8b   32 layers, hidden 4096, sequence 4096
    qwen3-30b-a3b  8 of 48 layers, hidden 2048, sequence 4096, 128 experts, top-8
    deepseek-v3    4 of 61 layers, hidden 7168, sequence 4096, 64 of 256 experts, top-8; optimizer states in bf16
    A:--num-layers 32 --global-batch-size 8    a configuration with additional flags of megatron.training
    C:--expert-model-parallel-size 1           MoE models use EP2 otherwise
Variants:
    eager                      Megatron-FSDP without graphs
    native                     with this project's graphs: of the whole model, or of parts of MoE layers
    full_iteration             with one graph for all passes of a step
    compute_alone              full_iteration without communication: each rank holds all parameters and accumulates all
                               gradients, and the optimizer updates its usual shard. Ranks still exchange losses, the
                               gradient norm and rerun decisions. With several ranks, the trained model is useless. If
                               the GPU is the bottleneck, the excess of a variant over this time is the cost of sharding
    eager+fused, ...           a variant with fused weight gradients; not in the default set
    eager+checks, ...          a variant that checks each micro-batch's loss, Megatron's default; not in the default set
    eager+grouped, ...         a variant with grouped experts (--moe-use-grouped-tensor)
    native+fused+checks        a variant with several additions
    native:NAME=VALUE,...:FLAGS    a variant with environment variables and flags; ~--flag removes a flag

The same processes train all variants of configurations with the same rank layout sequentially, each with a fresh model,
the same seed and the same data: first for timing, then for profiling with ``--profile``. Variants with different
``NCCL_`` or ``CUDA_`` variables run in separate processes. The loss and gradient norm of every step must be
bit-identical to the reference; otherwise, or if a run fails, the exit code is 1. On a shared host, host-bound steps
vary by a factor of up to 1.5 between launches: compare several with ``--launches``. Every tenth step logs and
synchronizes, so each time is a mean over ten steps. Without a GPU, tiny models train on the CPU backend, whose times
are meaningless.
"""

import argparse
import sys
import tempfile
from itertools import groupby
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

CPU_NOTE = "CPU backend: these times do not apply to GPUs."


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        SystemExit: An argument is invalid.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="number of ranks (default: all GPUs; 2 on the CPU backend)")
    parser.add_argument(
        "--train",
        nargs="+",
        action="append",
        metavar=("CONFIGURATION", "VARIANT"),
        help="a configuration and its variants (default: all that can run); repeat for others (default: A, B and C)",
    )
    parser.add_argument("--steps", type=int, default=40, help="steps of a run; times are from the second half")
    parser.add_argument("--launches", type=int, default=1, help="number of launches; results are medians over them")
    parser.add_argument("--profile", action="store_true", help="also profile a few steps of each run")
    parser.add_argument("--stall-seconds", type=float, default=240, help="time limit of a run")
    parser.add_argument("--logs", type=Path, help="folder for logs, traces and lists of functions")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    args = parser.parse_args(arguments)
    if args.steps < MIN_STEPS:
        parser.error(f"--steps {args.steps}: pass at least {MIN_STEPS}")
    if args.launches < 1:
        parser.error(f"--launches {args.launches}: pass at least 1")
    args.train = {name: own for name, *own in args.train or (["A"], ["B"], ["C"])}
    return args


class Benchmark:
    """Trains the chosen configurations and variants, and collects the results.

    Args:
        args: Parsed command line.
        on_cpu: Whether to use the CPU backend.
    """

    def __init__(self, args: argparse.Namespace, *, on_cpu: bool):
        self.args, self.on_cpu = args, on_cpu
        self.ranks: int = args.gpus or (2 if on_cpu else torch.cuda.device_count())
        options = {"ranks": self.ranks, "steps": args.steps, "on_cpu": on_cpu}
        self.configurations = [configurations.configuration(text, **options) for text in args.train]
        self.variants = {
            each.name: [
                variants.variant(text) for text in args.train[each.name] or variants.default_names(each, on_cpu=on_cpu)
            ]
            for each in self.configurations
        }
        self.results = Results(self.variants)
        self._planned = 0

    def run(self, logs: Path) -> None:
        """Train all runs of all launches."""
        plans = [self._plans(profiled=number == 0 and self.args.profile) for number in range(self.args.launches)]
        self._planned = sum(len(runs) for launch in plans for runs in launch)
        for number, launch in enumerate(plans):
            folder = logs
            if number:
                self.results.begin_launch()
                folder = logs / f"launch-{number + 1}"
                folder.mkdir(exist_ok=True)
            for runs in launch:
                run_plan(
                    runs,
                    ranks=self.ranks,
                    on_cpu=self.on_cpu,
                    logs=folder,
                    stall_seconds=self.args.stall_seconds,
                    show=self._keep,
                )

    def _plans(self, *, profiled: bool) -> list[list[Run]]:
        """Return one list of runs per rank layout."""
        by_layout = sorted(self.configurations, key=lambda each: sorted(each.layout.items()))
        plans = []
        for _, group in groupby(by_layout, key=lambda each: each.layout):
            trained = [(each, variant) for each in group for variant in self.variants[each.name]]
            plans.append(plan(trained, steps=self.args.steps, profiled=profiled))
        return plans

    def _keep(self, run: Run, result: dict[str, Any]) -> None:
        self.results.keep(run, result, self._planned)
        if self.args.output:
            self.args.output.parent.mkdir(parents=True, exist_ok=True)
            note: dict[str, Any] = {"note": CPU_NOTE} if self.on_cpu else {}
            write_results(
                self.args.output,
                command=command_line("benchmarks/step_time.py", sys.argv[1:]),
                gpus=self.ranks,
                **note,
                configurations=self.results.rows(),
                numbers=self.results.numbers(),
            )


def main() -> int:
    """Run the benchmark, and print a table for each configuration."""
    args = parse()
    benchmark = Benchmark(args, on_cpu=not torch.cuda.is_available())
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        benchmark.run(logs.resolve())
    found = benchmark.results.rows()
    place = CPU_NOTE if benchmark.on_cpu else f"{benchmark.ranks} x {torch.cuda.get_device_name()}"
    for name, rows in found.items():
        print("\n".join([f"\n{name}: {place}", report.table(rows), *report.kinds_of_kernels(rows)]))
    return int(any(report.failures(row) for rows in found.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
