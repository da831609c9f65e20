"""Memory of graphs in a pipeline, with static buffers that serve one micro-batch after another and without.

    python benchmarks/buffer_reuse.py --output buffer_reuse.json

Trains a GPT in two pipeline stages, of one model chunk each or of two that interleave, with graphs of TECudaGraphHelper
and with local graphs, each time in processes of its own: as they are, and with what lets buffers be used again switched
off (static inputs and gradients; for TECudaGraphHelper outputs too). Writes down what the allocator holds after capture
more than before, on the rank where it is most. Needs two GPUs; on the CPU backend (--cpu) it shows that it works: there
memory is not known.
"""

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
GRAPHS = ("transformer_engine", "local")
OPTIONS = ("layers", "hidden", "sequence", "microbatches")


def main() -> None:
    """Run every variant and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="where the figures go, as JSON")
    parser.add_argument("--cpu", action="store_true", help="on the CPU backend")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--graphs", choices=GRAPHS, help=argparse.SUPPRESS)  # in processes of their own
    parser.add_argument("--chunks", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--no-reuse", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.graphs:
        from megatron_fsdp_cuda_graphs.cpu_backend import leave

        measure(args)
        leave()
    rows = [
        {"graphs": graphs, "chunks": virtual or 1, "reuse": reuse, **run(args, graphs, virtual, reuse)}
        for graphs in GRAPHS
        for virtual in (None, 2)
        for reuse in (True, False)
    ]
    options = " ".join(f"--{name} {getattr(args, name)}" for name in OPTIONS)
    sys.path.insert(0, str(ROOT))
    from benchmarks.results_file import write_results

    command = f"python benchmarks/buffer_reuse.py {options}" + args.cpu * " --cpu"
    write_results(args.output, command=command, gpus=2, results=rows)
    for row in rows:
        print(json.dumps({name: value for name, value in row.items() if name != "losses"}))


def run(args: argparse.Namespace, graphs: str, virtual: int | None, reuse: bool) -> dict[str, Any]:
    """Measure one variant on two ranks."""
    options = [
        "--graphs",
        graphs,
        *(["--chunks", str(virtual)] if virtual else []),
        *([] if reuse else ["--no-reuse"]),
    ]
    file = args.output.with_suffix(".part")
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    deterministic = os.environ | {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    subprocess.run([*launch, *sys.argv, "--output", str(file), *options], check=True, env=deterministic)
    figures = json.loads(file.read_text())
    file.unlink()
    return figures


def measure(args: argparse.Namespace) -> None:
    """Train some steps; rank 0 writes the figures."""
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    if args.cpu:
        from megatron_fsdp_cuda_graphs import cpu_backend

        cpu_backend.install()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    from megatron.core import parallel_state
    from tests.support.case import Case
    from tests.support.training import Training

    dist.init_process_group("gloo" if args.cpu else "nccl")
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=args.chunks
    )
    local = args.graphs == "local"
    case = Case(
        fsdp=False,
        local=local,
        dtype="fp32" if args.cpu else "bf16",
        layers=args.layers,
        hidden=args.hidden,
        heads=args.hidden // 64 or 1,
        sequence=args.sequence,
        micro_batch=1,
        microbatches=args.microbatches,
        virtual=args.chunks,
        transformer_engine=not args.cpu,
        warmup=1,
    )
    training = Training(case, graphs=True)
    stats = {}
    with ExitStack() as stack:
        for patch in without_reuse() if args.no_reuse else ():
            stack.enter_context(patch)
        if local:
            from megatron.core.pipeline_parallel import schedules

            create = schedules.create_cudagraphs
            capture = mock.Mock(side_effect=lambda: stats.update(measured(create)))
            stack.enter_context(mock.patch.object(schedules, "create_cudagraphs", capture))
            training.step()
        else:
            training.step()
            training.make_helper()
            training.capture(lambda training: stats.update(measured(training.helper.create_cudagraphs)))
    for _ in range(2):
        training.step()
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, stats | {"losses": training.losses})
    if dist.get_rank() == 0:
        figures = {name: max(rank[name] for rank in ranks) for name in stats}
        args.output.write_text(json.dumps(figures | {"losses": ranks[0]["losses"]}))
    dist.barrier()


def measured(create: Any) -> dict[str, float]:
    """Call ``create`` and return what the allocator holds more after it, in MiB."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()
    create()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    after = torch.cuda.memory_stats()
    return {
        f"{kind}_MiB": (after[f"{kind}_bytes.all.current"] - before[f"{kind}_bytes.all.current"]) / 2**20
        for kind in ("allocated", "reserved")
    }


def without_reuse() -> list[Any]:
    """Patches under which every layer and micro-batch has buffers of its own."""
    from megatron.core.transformer._cuda_graphs.engine.buffers import BufferPool
    from megatron.core.transformer._cuda_graphs.te import sample_inputs
    from megatron.core.transformer._cuda_graphs.te.helper import TECudaGraphHelper

    input_data = TECudaGraphHelper._get_cuda_graph_input_data

    def own_inputs(plan: Any, signature_of: Any, inputs_of: Any) -> list[Any]:
        return [inputs_of(slot) for slot in range(len(plan.callable_of_slot))]

    def unshared(helper: Any) -> Any:
        sample_args, arguments = input_data(helper)
        return sample_args, arguments | {"_reuse_graph_input_output_buffers": False}

    return [
        mock.patch.object(TECudaGraphHelper, "_get_cuda_graph_input_data", unshared),
        mock.patch.object(sample_inputs, "share_inputs", own_inputs),
        mock.patch.object(BufferPool, "release"),
    ]


if __name__ == "__main__":
    main()
