"""Local graphs: this patch's against megatron-core's own, on the same model, in one run.

    python benchmarks/local_graphs.py --output local_graphs.json

Trains a GPT on one rank under DistributedDataParallel, each time in a process of its own: eagerly, with this patch's
local graphs, and with megatron-core's (MEGATRON_FSDP_CUDA_GRAPHS=0), one after the other, as many rounds as asked.
Writes down the median time of a replayed step, the time that the capture takes, and the memory that is allocated and
reserved after it; this patch's figures as ratios to megatron-core's, of the medians over rounds; and in how many rounds
all losses were those of the eager training.

Needs a GPU; without one the CPU backend takes its place, to show that it works: its times are a tape's, and what memory
it takes is not known.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = {"eager": ("none", "1"), "this patch": ("local", "1"), "megatron-core": ("local", "0")}
OPTIONS = ("rounds", "steps", "layers", "hidden", "sequence", "microbatches")
FIGURES = ("step_ms", "capture_s", "allocated_MiB", "reserved_MiB")


def main() -> None:
    """Run every variant in every round and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="where the figures go, as JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="steps after the recorded one")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--transformer-engine", action="store_true", help="TransformerEngine's layers")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if args.variant:
        from megatron_fsdp_cuda_graphs.cpu_backend import leave

        print(json.dumps(measure(args)))
        leave()
    rounds = [{variant: run(variant) for variant in VARIANTS} for _ in range(args.rounds)]
    medians = {
        variant: {figure: statistics.median(each[variant][figure] for each in rounds) for figure in FIGURES}
        for variant in VARIANTS
    }
    ours, theirs = medians["this patch"], medians["megatron-core"]
    ratios = {figure: ours[figure] / theirs[figure] if theirs[figure] else None for figure in FIGURES}
    options = " ".join(f"--{name} {getattr(args, name)}" for name in OPTIONS)
    found: dict[str, Any] = {
        "ratios": ratios,
        "equal_losses": {
            variant: sum(each[variant]["losses"] == each["eager"]["losses"] for each in rounds) for variant in VARIANTS
        },
        "medians": medians,
        "rounds": rounds,
    }
    sys.path.insert(0, str(ROOT))
    from benchmarks.results_file import write_results

    command = f"python benchmarks/local_graphs.py {options}" + args.transformer_engine * " --transformer-engine"
    write_results(args.output, command=command, **found)
    print(json.dumps({name: found[name] for name in ("ratios", "equal_losses", "medians")}, indent=1))


def run(variant: str) -> dict[str, Any]:
    """Measure one variant in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *sys.argv, "--variant", variant],
        env=os.environ | {"MEGATRON_FSDP_CUDA_GRAPHS": VARIANTS[variant][1], "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train and return the figures, and the losses to compare."""
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        from megatron_fsdp_cuda_graphs import cpu_backend

        cpu_backend.install()
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules
    from tests.support.trainings.case import Case
    from tests.support.trainings.training import Training

    impl = VARIANTS[args.variant][0]
    case = Case(
        wrapper="ddp",
        local=impl == "local",
        dtype="fp32" if on_cpu else "bf16",
        layers=args.layers,
        hidden=args.hidden,
        sequence=args.sequence,
        micro_batch=1,
        microbatches=args.microbatches,
        transformer_engine=args.transformer_engine,
        config=(("bucket_size", 40_000_000), ("num_attention_heads", args.hidden // 64 or 1)),
    )
    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if on_cpu else "nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        training = Training(case, graphs=impl == "local")
        capture, spent = schedules.create_cudagraphs, []

        def timed() -> None:
            torch.cuda.synchronize()
            start = time.perf_counter()
            capture()
            torch.cuda.synchronize()
            spent.append(time.perf_counter() - start)

        schedules.create_cudagraphs = timed
        training.step()
        schedules.create_cudagraphs = capture
        times = []
        for _ in range(args.steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            training.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        memory = torch.cuda.memory_stats()
        return {
            "step_ms": 1000 * statistics.median(times[len(times) // 3 :]),
            "capture_s": sum(spent),
            "allocated_MiB": memory["allocated_bytes.all.current"] / 2**20,
            "reserved_MiB": memory["reserved_bytes.all.current"] / 2**20,
            "losses": training.losses,
        }


if __name__ == "__main__":
    main()
