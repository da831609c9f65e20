"""What all-gathers and reductions take from matrix products beside them, by kind of communicator, and in CUDA graphs.

    torchrun --nproc-per-node 2 benchmarks/collectives_beside_gemms.py --output FILE

A kind is ``default``, or some of these with ``+`` between them:
    ctas=N             at most N thread blocks (``max_ctas``)
    priority           the communicator's stream before others
    window             buffers in a symmetric window, as Megatron-FSDP has them with ``--use-nccl-ub``
    policy=efficiency, policy=zero    NCCL's ``NCCL_CTA_POLICY``. With zero and a window, NCCL 2.28 gathers by copy
                       engines within a node, without thread blocks
Each moves a bucket of a layer's size between all ranks, on a stream of its own, while another stream multiplies
matrices: parameters by an all-gather, gradients by a reduce-scatter, in bfloat16 or float32, or by an all-to-all after
which each rank sums in float32 what it got (``--ddp-reduce-scatter-with-fp32-accumulation``). Medians of rank 0 in ms,
by events; a kind that cannot be had, or not be captured, says why. What arrives is compared with what ranks have. With
one rank there is nothing to move: that shows what can be captured, no more.
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
POLICIES = ("efficiency", "zero")
KINDS = [
    "default",
    "ctas=4",
    "ctas=8",
    "ctas=16",
    "priority",
    "window",
    "window+policy=efficiency",
    "window+policy=zero",
]

_MOVES: dict[str, Callable[..., Any]] = {
    "all_gather": dist.all_gather_into_tensor,
    "reduce_scatter": dist.reduce_scatter_tensor,
    "reduce_scatter_fp32": dist.reduce_scatter_tensor,
    "all_to_all": dist.all_to_all_single,
}
COLLECTIVES = list(_MOVES)


class Kind:
    """A communicator, and where its buffers are.

    Args:
        text: As in the module's docstring.

    Raises:
        ValueError: there is no such kind.
    """

    def __init__(self, text: str):
        self.window = False
        self._pools: list[Any] = []  # NCCL knows them as long as the communicator is there
        options = dist.ProcessGroupNCCL.Options()
        for setting in text.split("+"):
            name, _, value = setting.partition("=")
            if name == "ctas":
                options.config.max_ctas = int(value)
            elif name == "policy" and value in POLICIES:
                options.config.cta_policy = getattr(dist.ProcessGroupNCCL, f"NCCL_CTA_POLICY_{value.upper()}")
            elif name == "priority":
                options.is_high_priority_stream = True
            elif name == "window":
                self.window = True
            elif name != "default":
                raise ValueError(f"--kinds: there is no {setting!r}")
        self.group: Any = dist.new_group(backend="nccl", pg_options=options)
        dist.barrier(self.group)  # its communicator exists from now on

    def buffers(self, collective: str, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a rank gives and what it gets: together ``elements`` of all ranks on the larger side."""
        if self.window:
            from megatron.core import nccl_allocator

            nccl_allocator.init()
            self._pools.append(nccl_allocator.create_nccl_mem_pool(symmetric=True))
            with nccl_allocator.nccl_mem(self._pools[-1], group=self.group):
                return self._allocate(collective, elements)
        return self._allocate(collective, elements)

    def _allocate(self, collective: str, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.float32 if collective == "reduce_scatter_fp32" else torch.bfloat16
        whole = torch.zeros(elements, dtype=dtype, device="cuda")
        if collective == "all_to_all":
            return whole, torch.zeros_like(whole)
        shard = torch.zeros(elements // self.group.size(), dtype=dtype, device="cuda")
        return (shard, whole) if collective == "all_gather" else (whole, shard)


class Case:
    """Collectives and products of one kind of communicator.

    Args:
        kind: The communicator.
        collective: One of ``COLLECTIVES``.
        elements: Of the bucket, over all ranks.
        count: How many collectives, one after another.
        products: How many products beside them.
        size: Of the square matrices.
    """

    def __init__(self, kind: Kind, collective: str, elements: int, count: int, products: int, size: int):
        self._group, self._collective = kind.group, collective
        self._given, self._got = kind.buffers(collective, elements)
        self._given.fill_(self._group.rank() + 1)
        left, right, product = (torch.ones(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        self._stream = torch.cuda.Stream()
        move = _MOVES[collective]
        parts = self._got.view(self._group.size(), -1)
        self._sum = torch.zeros_like(parts[0]) if collective == "all_to_all" else self._got

        def communicate() -> None:
            for _ in range(count):
                move(self._got, self._given, group=self._group)
                if collective == "all_to_all":
                    self._sum.copy_(parts.sum(0, dtype=torch.float32))

        def multiply() -> None:
            for _ in range(products):
                torch.mm(left, right, out=product)

        self._works: dict[str, tuple[Work | None, Work | None]] = {
            "alone": (communicate, None),
            "products": (None, multiply),
            "both": (communicate, multiply),
        }

    def is_right(self) -> bool:
        """Whether what arrived is what all ranks gave."""
        ranks = self._group.size()
        if self._collective != "all_gather":
            return bool((self._sum == ranks * (ranks + 1) // 2).all())
        return all(bool((part == rank + 1).all()) for rank, part in enumerate(self._got.view(ranks, -1)))

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
        """Return the times of the collectives, of the products, and of both at a time."""
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
            self._sum.zero_()
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
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES)
    parser.add_argument("--elements", type=int, default=50_331_648, help="of a bucket: a layer of hidden size 2048")
    parser.add_argument("--count", type=int, default=8, help="collectives, one after another")
    parser.add_argument("--products", type=int, default=40)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    args = parser.parse_args(arguments)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rows: list[dict[str, Any]] = []
    command = command_line("benchmarks/collectives_beside_gemms.py", sys.argv[1:] if arguments is None else arguments)
    with torch.cuda.stream(torch.cuda.Stream()):
        for text in args.kinds:
            kind = Kind(text)
            for collective in args.collectives:
                case: Case | None = None
                for graph in (False, True):
                    row: dict[str, Any] = {"kind": text, "collective": collective, "graph": graph}
                    try:
                        case = case or Case(kind, collective, args.elements, args.count, args.products, args.size)
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
