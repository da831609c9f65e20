"""Train cases eagerly and with CUDA graphs, one process per GPU or CPU rank, and write the differences.

    torchrun --nproc-per-node 2 tests/support/trainings/compare_runs.py --cases cases.json --output results.json --tp 2
    torchrun --nproc-per-node 2 tests/support/trainings/compare_runs.py --serve /dev/stdin

``cases.json`` lists arguments of ``Case.of``; the optional key ``control`` names one of ``controls.CONTROLS``. Without
a GPU, ranks use the CPU backend. ``--serve`` reads jobs from a file or pipe: each line contains the other arguments of
one job. On GPUs, each rank layout needs its own processes because NCCL keeps the memory of unused communicators.
"""

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist

from megatron_fsdp_cuda_graphs import cpu_backend
from tests.support.ranks.rank_backend import on_cpu  # isort: split

from tests.support.trainings.case import Case
from tests.support.trainings.controls import CONTROLS
from tests.support.trainings.training import Trace, train


def main() -> None:
    """Run the job given on the command line, or the jobs read by ``--serve``."""
    args = parse(sys.argv[1:])
    if not on_cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Ranks started with --serve wait for their next job without a timeout.
    dist.init_process_group("gloo" if on_cpu else "nccl", timeout=timedelta(days=1))
    served = Served()
    for job in jobs(args.serve) if args.serve else (args,):
        served.run(job)
    dist.destroy_process_group()
    cpu_backend.leave()  # on GPUs as well: torch aborts if NCCL windows outlive their communicators


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments of a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, help="JSON list of cases")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel ranks")
    parser.add_argument("--cp", type=int, default=1, help="context parallel ranks")
    parser.add_argument("--ep", type=int, default=1, help="expert parallel ranks")
    parser.add_argument("--etp", type=int, default=None, help="tensor parallel ranks of experts")
    parser.add_argument("--instances", type=int, default=1, help="HSDP replicas")
    parser.add_argument("--stop-at-error", action="store_true", help="write the first error of any rank and exit")
    parser.add_argument("--serve", type=Path, help="file or pipe of jobs: the other arguments, one job per line")
    return parser.parse_args(arguments)


def jobs(source: Path) -> Iterator[argparse.Namespace]:
    """Yield the jobs in ``source``; the first rank reads each line and broadcasts it to all ranks."""
    with source.open() if dist.get_rank() == 0 else nullcontext() as lines:
        while True:
            line = [lines.readline() if lines else ""]
            dist.broadcast_object_list(line)
            if not line[0]:
                return
            yield parse(line[0].split())


class Served:
    """Runs jobs; reuses process groups and eager results for later jobs with the same layout."""

    def __init__(self) -> None:
        self._layout: dict[str, int | None] = {}
        self._eager: dict[Case, Trace] = {}

    def run(self, args: argparse.Namespace) -> None:
        """Run every case; the first rank writes the results after each one."""
        self._arrange(args)
        results = []
        for arguments in json.loads(args.cases.read_text()):
            control = arguments.pop("control", None)
            errors_to = args.output if args.stop_at_error else None
            results.append(compare(Case.of(arguments), control, self._eager, errors_to))
            gc.collect()
            gc.freeze()  # exclude live objects from garbage collection during captures
            if dist.get_rank() == 0:
                partial = args.output.with_suffix(".partial")  # readers always find complete JSON
                partial.write_text(json.dumps(results, indent=1))
                partial.replace(args.output)
                shown = results[-1]["error"][-300:] or results[-1]["differences"][:3] or "bit-equal"
                print(f"{results[-1]['case']}: {shown} ({results[-1]['seconds']:.1f} s)", flush=True)

    def _arrange(self, args: argparse.Namespace) -> None:
        """Initialize the process groups for the layout."""
        from megatron.core import parallel_state

        layout: dict[str, int | None] = {
            "tensor_model_parallel_size": args.tp,
            "pipeline_model_parallel_size": args.pp,
            "context_parallel_size": args.cp,
            "expert_model_parallel_size": args.ep,
            "expert_tensor_parallel_size": args.etp,
            "num_distributed_optimizer_instances": args.instances,
        }
        if layout == self._layout:
            return
        if self._layout:
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**layout)
        if dist.get_world_size() == 1:  # one rank can represent two replicas
            parallel_state._INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP = dist.new_group([0])
        self._layout, self._eager = layout, {}


def compare(case: Case, control: str | None, eager: dict[Case, Trace], errors_to: Path | None = None) -> dict:
    """Train ``case`` eagerly and with graphs, and gather the differences.

    Args:
        case: The case to train.
        control: Name in ``CONTROLS`` of the function to call in place of the capture; None to capture normally.
        eager: Cache of eager results; the keys are cases without graph options.
        errors_to: File for the first error, after which the process exits; None to continue after errors.
    """
    from megatron.core import parallel_state

    start, error, differences = time.perf_counter(), "", []
    graphed = None
    try:
        config = tuple(each for each in case.config if not each[0].startswith("cuda_graph"))
        same_eager = replace(case, modules=(), holds="model", local=False, full_iteration=False, config=config)
        if same_eager not in eager:
            eager[same_eager] = train(same_eager, graphs=False)
        graphed = train(case, graphs=True, at_capture=CONTROLS[control] if control else None)
        differences = eager[same_eager].differences(graphed)
    except Exception:
        error = traceback.format_exc()
        if errors_to is not None:
            # Other ranks may be waiting for this one and fail later.
            with suppress(FileExistsError), errors_to.open("x") as file:
                json.dump([{"case": str(case), "error": error, "differences": []}], file)
            os._exit(1)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:  # another stage may be waiting for this one
            print(f"{case}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    errors: list = [None] * dist.get_world_size()
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)  # hangs unless all ranks fail at the same place
    dist.all_gather_object(of_ranks, differences)
    error = next(filter(None, errors), "")
    return {
        "case": str(case) + (f" control={control}" if control else ""),
        "differences": [f"rank {rank}: {line}" for rank, lines in enumerate(of_ranks) for line in lines or []],
        "error": error,
        "graphs": graphed.graphs if graphed else 0,
        "replays": graphed.replays if graphed else 0,
        "evaluation_replays": graphed.evaluation_replays if graphed else [],
        "clipping_replays": graphed.clipping_replays if graphed else 0,
        "step_replays": graphed.step_replays if graphed else [],
        "losses": graphed.losses if graphed else [],
        "grad_norms": graphed.grad_norms if graphed else [],
        "seconds": time.perf_counter() - start,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


if __name__ == "__main__":
    main()
