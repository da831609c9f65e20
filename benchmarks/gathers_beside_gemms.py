"""What all-gathers take from matrix products beside them, by kind of communicator, eagerly and in CUDA graphs.

    torchrun --nproc-per-node 2 benchmarks/gathers_beside_gemms.py --output FILE

Kinds:
    default         NCCL as it comes
    ctas=N          at most N thread blocks (``max_ctas``)
    copy_engines    ``NCCL_CTA_POLICY_ZERO``, with the output in a symmetric window: NCCL 2.28 then moves data by copy
                    engines, within a node
Each gathers a bucket of a layer's size from all ranks, on a stream of its own, while another stream multiplies
matrices. Medians of rank 0 in ms, by events; a kind that cannot be had, or not be captured, says why. What is gathered
is compared with what ranks have. With one rank there is nothing to move: that shows what can be captured, no more.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.results_file import command_line, write_results  # noqa: E402

Work = Callable[[], None]


def group_of(kind: str) -> Any:
    """Return a process group of all ranks whose communicator is of ``kind``."""
    name, _, value = kind.partition("=")
    if name == "default":
        return dist.new_group(backend="nccl")
    options = dist.ProcessGroupNCCL.Options()
    if name == "ctas":
        options.config.max_ctas = int(value)
    else:
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    return dist.new_group(backend="nccl", pg_options=options)


def output_of(kind: str, group: Any, elements: int) -> torch.Tensor:
    """Return the bfloat16 output of all-gathers, in a symmetric window where ``kind`` needs one."""
    if kind != "copy_engines":
        return torch.empty(elements, dtype=torch.bfloat16, device="cuda")
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend("NCCL")
    output = symmetric.empty(elements, dtype=torch.bfloat16, device=torch.device("cuda", torch.cuda.current_device()))
    symmetric.rendezvous(output, group)
    return output


class Case:
    """All-gathers and products of one kind of communicator.

    Args:
        kind: As in the module's docstring.
        elements: Of the bucket that is gathered, over all ranks.
        gathers: How many, one after another.
        products: How many beside them.
        size: Of the square matrices.
    """

    def __init__(self, kind: str, elements: int, gathers: int, products: int, size: int):
        group = group_of(kind)
        own = torch.full((elements // group.size(),), float(group.rank() + 1), dtype=torch.bfloat16, device="cuda")
        self._output, self._group = output_of(kind, group, elements), group
        left, right, product = (torch.ones(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        self._stream = torch.cuda.Stream()

        def gather() -> None:
            for _ in range(gathers):
                dist.all_gather_into_tensor(self._output, own, group=group)

        def multiply() -> None:
            for _ in range(products):
                torch.mm(left, right, out=product)

        self._works: dict[str, tuple[Work | None, Work | None]] = {
            "gathers": (gather, None),
            "products": (None, multiply),
            "both": (gather, multiply),
        }

    def is_right(self) -> bool:
        """Whether the output has what all ranks gave."""
        parts = self._output.view(self._group.size(), -1)
        return all(bool((part == rank + 1).all()) for rank, part in enumerate(parts))

    def _run(self, beside: Work | None, here: Work | None) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        if beside is not None:
            with torch.cuda.stream(self._stream):
                beside()
        if here is not None:
            here()
        current.wait_stream(self._stream)

    def measure(self, times: int, *, graph: bool) -> dict[str, Any]:
        """Return the times of the gathers, of the products, and of both at a time."""
        found: dict[str, Any] = {}
        for name, works in self._works.items():
            run: Work = partial(self._run, *works)
            run()
            torch.cuda.synchronize()
            if graph:
                recorded = torch.cuda.CUDAGraph()
                with torch.cuda.graph(recorded):
                    run()
                run = recorded.replay
            self._output.zero_()
            found[f"{name}_ms"] = _median(run, times)
            if works[0] is not None:
                found["right"] = found.get("right", True) and self.is_right()
        return found


def _median(run: Work, times: int) -> float:
    taken = []
    for _ in range(times + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end))
    return round(statistics.median(taken[1:]), 3)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["default", "ctas=4", "ctas=8", "ctas=16", "copy_engines"])
    parser.add_argument("--elements", type=int, default=50_331_648, help="of a bucket: a layer of hidden size 2048")
    parser.add_argument("--gathers", type=int, default=8)
    parser.add_argument("--products", type=int, default=40)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    args = parser.parse_args(arguments)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rows: list[dict[str, Any]] = []
    command = command_line("benchmarks/gathers_beside_gemms.py", sys.argv[1:] if arguments is None else arguments)
    with torch.cuda.stream(torch.cuda.Stream()):
        for kind in args.kinds:
            for graph in (False, True):
                row: dict[str, Any] = {"kind": kind, "graph": graph}
                try:
                    case = Case(kind, args.elements, args.gathers, args.products, args.size)
                    row |= case.measure(args.times, graph=graph)
                except Exception as error:  # the next kind may be had
                    row["error"] = f"{type(error).__name__}: {error}"[:300]
                rows.append(row)
                if dist.get_rank() == 0:
                    print(row, flush=True)
                    if args.output:  # the next kind may end the process
                        write_results(args.output, command=command, gpus=dist.get_world_size(), results=rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
