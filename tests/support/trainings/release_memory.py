"""Release and restore the graphs of a model in training, and print memory and times of each rank as JSON lines.

    torchrun --nproc-per-node 1 tests/support/trainings/release_memory.py
    torchrun --nproc-per-node 2 tests/support/trainings/release_memory.py --holds layer

Memory is measured before the first capture, then in several cycles of training, evaluation, ``release`` and
``restore``. In the output, ``blocks`` is the number of allocated blocks of each size beyond the first measurement.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist

from tests.support.ranks.rank_backend import on_cpu  # isort: split

from tests.support.trainings.case import Case
from tests.support.trainings.training import Training

# Model A of the benchmarks, with a small vocabulary
A: dict[str, Any] = {
    "layers": 16,
    "hidden": 2048,
    "num_attention_heads": 16,
    "sequence": 2048,
    "micro_batch": 1,
    "transformer_engine": True,
}
ON_CPU: dict[str, Any] = {"layers": 3, "hidden": 32, "sequence": 16, "micro_batch": 1}
CYCLES = 3


def main() -> None:
    """Measure the model given on the command line."""
    from megatron.core import parallel_state

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--holds", choices=("model", "layer"), default="model", help="largest captured unit")
    args = parser.parse_args()
    if not on_cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if on_cpu else "nccl")
    parallel_state.initialize_model_parallel()
    training = Training(Case.of({**(ON_CPU if on_cpu else A), "dtype": "bf16", "holds": args.holds}), graphs=True)
    with torch.cuda.stream(training.stream):
        measure(training)
    dist.destroy_process_group()


def measure(training: Training) -> None:
    """Capture, then train, evaluate, release and restore in cycles."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    # Scales that the first capture of a process allocates for models that have none
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1, device="cuda")
    MTPLossAutoScaler.set_loss_scale(torch.ones(1, device="cuda"))
    helper = training.make_helper()
    for _ in range(training.case.warmup):
        training.step()
    training.evaluate()
    helper.release()
    first = blocks()
    report("before capture", {})
    helper.create_cudagraphs()
    for cycle in range(CYCLES):
        training.step()
        training.evaluate()
        training.step()
        allocated = torch.cuda.memory_allocated()
        seconds = {"release": timed(helper.release)}
        new = {str(size): count for size, count in (blocks() - first).items()}
        report(
            f"released {cycle + 1}", {"before": allocated, "blocks": new, "restore": timed(helper.restore), **seconds}
        )
    training.step()
    helper.delete_cuda_graphs()


def report(phase: str, values: dict[str, Any]) -> None:
    """Print a JSON line."""
    print(json.dumps({"rank": dist.get_rank(), "phase": phase, **measured, **values}), flush=True)


measured: dict[str, int] = {}  # by ``blocks``


def blocks() -> Counter[int]:
    """Free unused memory, store memory totals in ``measured``, and return the number of allocated blocks by size."""
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    measured["allocated"], measured["reserved"] = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    segments = torch.cuda.memory_snapshot(include_traces=False)
    found = (block for segment in segments for block in segment.get("blocks", ()))
    return Counter(block["size"] for block in found if block["state"] != "inactive")


def timed(call: Any) -> float:
    """Return the seconds that ``call`` takes."""
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
