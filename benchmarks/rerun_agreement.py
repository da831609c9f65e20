"""How long ranks take to agree on whether a step runs again while their devices run a CUDA graph.

    torchrun --nproc-per-node 2 benchmarks/rerun_agreement.py --output FILE

By megatron-core's rerun state machine, through their hosts and, as with ``--disable-gloo-process-groups``, on their
devices; each with a graph of matrix products that was launched right before, and without. Medians of rank 0, in ms. On
the CPU backend (``-m megatron_fsdp_cuda_graphs.cpu_backend`` before the script) times say nothing about GPUs.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.results_file import command_line, write_results  # noqa: E402
from megatron.core import parallel_state, rerun_state_machine  # noqa: E402


class Products:
    """A graph of bfloat16 products of square matrices, one after another.

    Args:
        products: How many.
        size: Of the matrices.
    """

    def __init__(self, products: int, size: int):
        self._matrices = [torch.zeros(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        left, right, out = self._matrices
        torch.mm(left, right, out=out)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(products):
                torch.mm(left, right, out=out)

    def launch(self) -> None:
        """Give the device all of it."""
        self._graph.replay()


def measure(launch: Callable[[], None], times: int, *, hosts: bool) -> dict[str, float]:
    """Return the milliseconds until ranks agree and until the device is done, both from before ``launch``.

    Args:
        launch: Gives the device its work.
        times: How often it is measured.
        hosts: Whether ranks agree through their hosts.
    """
    parallel_state.initialize_model_parallel(create_gloo_process_groups=hosts)
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    machine = rerun_state_machine.get_rerun_state_machine()
    agreed, done = [], []
    try:
        for _ in range(times + 1):
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            launch()
            machine._reduce_any(False)
            agreed.append(time.perf_counter() - start)
            torch.cuda.synchronize()
            done.append(time.perf_counter() - start)
    finally:
        rerun_state_machine.destroy_rerun_state_machine()
        parallel_state.destroy_model_parallel()
    first_left_out = {"agreed_ms": agreed[1:], "done_ms": done[1:]}  # the first sets up communicators
    return {name: round(1000 * statistics.median(each), 3) for name, each in first_left_out.items()}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", type=int, default=200, help="matrix products in the graph")
    parser.add_argument("--size", type=int, default=2048, help="of the square matrices")
    parser.add_argument("--times", type=int, default=50, help="how often each is measured")
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    args = parser.parse_args(arguments)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    launch = Products(args.products, args.size).launch
    rows = [
        {"through": "hosts" if hosts else "devices", "graph": graph}
        | measure(launch if graph else lambda: None, args.times, hosts=hosts)
        for graph in (False, True)
        for hosts in (False, True)
    ]
    if dist.get_rank() == 0:
        print("\n".join(map(str, rows)))
        if args.output:
            command = command_line("benchmarks/rerun_agreement.py", sys.argv[1:] if arguments is None else arguments)
            write_results(args.output, command=command, gpus=dist.get_world_size(), results=rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
