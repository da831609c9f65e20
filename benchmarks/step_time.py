"""Time of a training step: Megatron-FSDP eagerly, with graphs, with one graph for all passes; DistributedDataParallel.

    python benchmarks/step_time.py --gpus 2 --output step_time.json

Configurations, in bf16 with micro-batches of one sequence, trained by ``examples/pretrain_gpt.py``:
    A  16 layers, hidden 2048, sequence 2048
    B   8 layers, hidden 1024, sequence 512: bound by the host
    C   8 layers, hidden 2048, sequence 2048, 8 experts of which a token takes 2, a shared expert
    A:--num-layers 32 --global-batch-size 8    one of them with further flags of megatron.training
Variants:
    eager                      Megatron-FSDP without graphs
    native                     with graphs by this project's engine (of the whole model, of parts of C's layers)
    full_iteration             with one graph for all passes of a step
    compute_alone              full_iteration without communication: each rank holds all parameters and accumulates all
                               gradients by itself, none is gathered or reduced (losses, the gradient norm and what
                               ranks agree on still are), and the optimizer steps on its usual shard. What it trains is
                               of no use with more than one rank. Where the GPU bounds a step, what takes longer
                               than this is what sharding costs
    ddp, ddp_graphs            DistributedDataParallel and the distributed optimizer, without and with a graph per layer
    fsdp2, fsdp2_graphs        torch's FSDP2, likewise; not of the default
    eager+optimizer, ...       any of them with a graph of the optimizer,
    eager+fused, ...           with gradients of weights that products write where they are reduced (no default),
    eager+checks, ...          with each micro-batch's loss looked at, as by default in Megatron (no default),
    eager+grouped, ...         with experts of C and D in one call each way,
    native+fused+optimizer     or with several of these
    native:NAME=VALUE,...:FLAGS    one of them with further environment variables and flags; ~--flag removes one

All variants of configurations with the same ranks run one after the other in the same processes (those with the same
variables of NCCL, which reads them once), each with a fresh model, the same seed and the same data: first to take
times, then again to be profiled. Every step's loss and gradient norm must equal the reference's bit for bit. The exit
code is 1 where they do not, or where a run failed. On a shared host a step that the host bounds takes up to half as
long again in one launch as in the next: ``--launches`` compares several. Every tenth step prints a line of the log; a
time is the mean over the steps from one line to the next, as the host runs ahead where nothing is printed. Without a
GPU it trains tiny models on the CPU backend, whose times mean nothing.
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
from benchmarks._step_time.plot import plot  # noqa: E402
from benchmarks._step_time.results import Results  # noqa: E402
from benchmarks._step_time.spread import sentence  # noqa: E402
from benchmarks.results_file import command_line, write_results  # noqa: E402

CPU_NOTE = "CPU backend: these times say nothing about GPUs."


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments.

    Raises:
        SystemExit: they are wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="ranks (default: all GPUs; 2 on the CPU backend)")
    parser.add_argument("--configurations", nargs="+", default=["A", "B", "C"], metavar="NAME[:FLAGS]")
    parser.add_argument("--variants", nargs="+", metavar="NAME[:VARIABLES[:FLAGS]]", help="default: all that can run")
    parser.add_argument("--steps", type=int, default=40, help="timed steps; times are of their second half")
    parser.add_argument("--expert-parallel", type=int, default=2, help="ranks over which C's experts are spread")
    parser.add_argument(
        "--launches", type=int, default=1, help="start the processes so often; times and ratios are medians over them"
    )
    parser.add_argument("--no-profile", action="store_true", help="take times only")
    parser.add_argument("--top-python", type=int, default=40, help="Python functions that a profile lists")
    parser.add_argument("--stall-seconds", type=float, default=240, help="a run that takes longer has failed")
    parser.add_argument("--logs", type=Path, help="folder for logs, traces and lists of functions")
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON; the plot is beside it")
    args = parser.parse_args(arguments)
    if args.steps < MIN_STEPS:
        parser.error(f"--steps must be at least {MIN_STEPS}")
    if args.launches < 1:
        parser.error("--launches must be at least 1")
    return args


class Benchmark:
    """What was chosen, and what was found so far.

    Args:
        args: The command line's.
        on_cpu: Whether there is no GPU.
    """

    def __init__(self, args: argparse.Namespace, *, on_cpu: bool):
        self.args, self.on_cpu = args, on_cpu
        self.ranks: int = args.gpus or (2 if on_cpu else torch.cuda.device_count())
        options = {"ranks": self.ranks, "steps": args.steps, "expert_parallel": args.expert_parallel, "on_cpu": on_cpu}
        self.configurations = [configurations.configuration(text, **options) for text in args.configurations]
        self.variants = {
            each.name: [variants.variant(text) for text in args.variants or variants.default_names(each, on_cpu=on_cpu)]
            for each in self.configurations
        }
        self.results = Results(self.variants)
        self._planned = 0

    def run(self, logs: Path) -> None:
        """Train everything, in as many launches for each layout of ranks as were asked for."""
        plans = [self._plans(profiled=number == 0 and not self.args.no_profile) for number in range(self.args.launches)]
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
        """The runs of each layout of ranks."""
        by_layout = sorted(self.configurations, key=lambda each: each.expert_parallel)
        plans = []
        for _, group in groupby(by_layout, key=lambda each: each.expert_parallel):
            trained = [(each, variant) for each in group for variant in self.variants[each.name]]
            plans.append(plan(trained, steps=self.args.steps, profiled=profiled, top_python=self.args.top_python))
        return plans

    def _keep(self, run: Run, result: dict[str, Any]) -> None:
        self.results.keep(run, result, self._planned)
        self.write()

    def write(self) -> None:
        """Write what was found so far."""
        if self.args.output:
            self.args.output.parent.mkdir(parents=True, exist_ok=True)
            found: dict[str, Any] = {"note": CPU_NOTE} if self.on_cpu else {}
            write_results(
                self.args.output,
                command=command_line("benchmarks/step_time.py", sys.argv[1:]),
                gpus=self.ranks,
                **found,
                configurations=self.results.rows(),
                numbers=self.results.numbers(),
            )


def main() -> int:
    """Run what was chosen, print a table for each configuration, write the results."""
    args = parse()
    benchmark = Benchmark(args, on_cpu=not torch.cuda.is_available())
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        benchmark.run(logs.resolve())
    found = benchmark.results.rows()
    place = CPU_NOTE if benchmark.on_cpu else f"{benchmark.ranks} x {torch.cuda.get_device_name()}"
    if args.output and not plot(args.output.with_suffix(".png"), found, place):
        print("no plot: matplotlib is not installed")
    for name, rows in found.items():
        print("\n".join([f"\n{name}: {place}", report.table(rows), *filter(None, map(sentence, rows))]))
        print("\n".join([*report.kinds_of_kernels(rows), *report.more_kernels(rows)]))
    return int(any(report.failures(row) for rows in found.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
