"""Trains cases eagerly several times over, and says in which step and which gradients the runs first differ.

    torchrun --nproc-per-node 2 tests/support/repeat_eager.py --cases cases.json --output results.json --ep 2

What differs from run to run without graphs cannot be compared with graphs. ``cases.json`` is as for
``compare_runs.py``, without controls. Runs that are equal with ``CUDA_LAUNCH_BLOCKING=1`` only have a race between
streams. The exit code is 1 where runs differ. Without a GPU it runs on the CPU backend.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from megatron_fsdp_cuda_graphs import cpu_backend
from tests.support.rank_backend import on_cpu  # isort: split

from benchmarks.results_file import command_line, write_results
from tests.support.case import Case
from tests.support.first_difference import Run, Sums, first_difference
from tests.support.training import Training


def gradients(training: Training) -> Sums:
    """The sums of each main gradient, and of its absolute values, by the parameter's name."""
    torch.cuda.synchronize()
    found: Sums = {}
    for chunk in training.chunks:
        for name, param in chunk.named_parameters():
            grad = next((grad for grad in (getattr(param, "main_grad", None), param.grad) if grad is not None), None)
            if grad is not None:
                grad = getattr(grad, "_local_tensor", grad).double()
                found[name] = grad.sum().item(), grad.abs().sum().item()
    return found


def run(case: Case, steps: int) -> Run:
    """Train eagerly; the gradients are those before the optimizer's step."""
    training = Training(case, graphs=False)
    optimize, seen = training.optimizer.step, []

    def step(*args: Any, **kwargs: Any) -> Any:
        seen.append(gradients(training))
        return optimize(*args, **kwargs)

    try:
        with mock.patch.object(training.optimizer, "step", step):
            for _ in range(steps):
                training.step()
    finally:
        training.patches.close()
    return training.losses, training.grad_norms, seen


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True, help="JSON list of cases")
    parser.add_argument("--output", type=Path, required=True, help="where the results go, as JSON")
    parser.add_argument("--runs", type=int, default=5, help="of each case; all are compared with the first")
    parser.add_argument("--steps", type=int, default=4, help="of each run")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--ep", type=int, default=1, help="expert parallel ranks")
    args = parser.parse_args()
    if not on_cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if on_cpu else "nccl")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tp, expert_model_parallel_size=args.ep)
    results = []
    for arguments in json.loads(args.cases.read_text()):
        given: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in arguments.items()}
        case = Case(**given)
        first, *others = (run(case, args.steps) for _ in range(args.runs))
        mine = [first_difference(first, other) for other in others]
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        results.append({"case": str(case), "runs": args.runs, "differences": of_ranks})
        if dist.get_rank() == 0:
            command = command_line("tests/support/repeat_eager.py", sys.argv[1:]).replace(
                "python", f"torchrun --nproc-per-node {dist.get_world_size()}", 1
            )
            write_results(args.output, command=command, gpus=dist.get_world_size(), results=results)
            shown = next((found for found in mine if found), None)
            print(f"{case}: {f'differ: {shown}' if shown else 'all runs are equal'}", flush=True)
    dist.destroy_process_group()
    if on_cpu:
        cpu_backend.leave()
    return int(any(found for result in results for rank in result["differences"] for found in rank))


if __name__ == "__main__":
    sys.exit(main())
