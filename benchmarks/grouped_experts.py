"""Which kernel for the experts of a layer: can a graph replay it for other numbers of tokens, what bits, what time?

    python benchmarks/grouped_experts.py --output grouped_experts.json

The linear layers of a dropless layer's experts, bf16: ``torch.nn.functional.grouped_mm``, whose offsets are read on the
device; TransformerEngine's ``GroupedLinear``, whose numbers of tokens the host knows; and a matmul an expert. For each:

- bits: a graph of forward and backward captured with balanced experts is replayed for other offsets, among them empty
  experts and one that has all tokens, and compared with the eager call; calls are repeated; no call may synchronise.
- error: of the output and both gradients against fp64, relative to the largest value.
- time on the GPU of one forward pass, one backward pass, or both (in a graph, so that no host is in it).

Needs a GPU; TransformerEngine's rows need TransformerEngine.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from results_file import command_line, write_results
from torch.nn.functional import grouped_mm

BF16 = torch.bfloat16
# Experts, rows of all (tokens times top-k), features in, features out.
SHAPES = {
    "C fc1": (8, 4096, 2048, 2048),
    "C fc1 gated": (8, 4096, 2048, 4096),
    "D fc1 gated": (32, 4096, 1024, 1024),
    "D fc2": (32, 4096, 512, 1024),
}
CALLS = 20  # in a graph that is timed


def counts_of(kind: str, experts: int, rows: int) -> list[int]:
    """Return the number of rows of each expert."""
    if kind == "balanced":
        return [rows // experts] * experts
    if kind == "all to one":
        return [0] * (experts - 2) + [rows, 0]
    generator = torch.Generator().manual_seed(len(kind))
    share = torch.rand(experts, generator=generator) ** 3
    share[1] = 0
    counts = (share / share.sum() * rows).long()
    counts[0] += rows - counts.sum()
    return counts.tolist()


def sample(experts: int, rows: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random rows ``[rows, k]``, weights ``[experts, n, k]`` and gradients of the output ``[rows, n]``."""
    torch.manual_seed(0)
    x = torch.randn(rows, k, device="cuda", dtype=BF16)
    weight = torch.randn(experts, n, k, device="cuda", dtype=BF16) * k**-0.5
    return x, weight, torch.randn(rows, n, device="cuda", dtype=BF16)


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)


def grouped(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
    """Return output and gradients of input and weight by ``grouped_mm``."""
    return [forward(x, weight, offsets), input_gradient(grad, weight, offsets), weight_gradient(x, grad, offsets)]


def forward(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return grouped_mm(x, weight.transpose(1, 2), offs=offsets)


def input_gradient(grad: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return grouped_mm(grad, weight, offs=offsets)


def weight_gradient(x: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return grouped_mm(grad.t(), x, offs=offsets)


def each(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, counts: list[int]) -> list[Any]:
    """As ``grouped``, by a matmul for each expert, in the precision of its arguments; a list of weight gradients."""
    xs, grads = x.split(counts), grad.split(counts)
    return [
        torch.cat([own @ w.t() for own, w in zip(xs, weight, strict=True)]),
        torch.cat([own @ w for own, w in zip(grads, weight, strict=True)]),
        [g.t() @ own for own, g in zip(xs, grads, strict=True)],
    ]


def stacked(found: list[Any]) -> list[torch.Tensor]:
    """Return ``found`` with its last part, a list of tensors, as one."""
    return [*found[:-1], torch.stack(found[-1])]


def graph_of(call: Callable[[], Any], calls: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            result = call()
    return graph, result


def microseconds(call: Callable[[], Any]) -> float:
    """Return the time of one call on the GPU: the median of 15 replays of a graph of ``CALLS`` calls."""
    graph, _ = graph_of(call, CALLS)
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return round(sorted(times)[len(times) // 2], 1)


def te_layer(experts: int, weight: torch.Tensor) -> torch.nn.Module | None:
    try:
        from transformer_engine.pytorch import GroupedLinear
    except ImportError:
        return None
    layer = GroupedLinear(experts, weight.shape[2], weight.shape[1], bias=False, params_dtype=BF16, device="cuda")
    with torch.no_grad():
        for index in range(experts):
            getattr(layer, f"weight{index}").copy_(weight[index])
    return layer


def te_pass(layer: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor, counts: list[int]) -> list[Any]:
    """As ``each``, by TransformerEngine."""
    x = x.detach().requires_grad_()
    out = layer(x, counts)
    weights = list(layer.parameters())
    grads = torch.autograd.grad(out, [x, *weights], grad)
    return [out.detach(), grads[0], grads[1:]]


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    """Return the largest error of each tensor, relative to its largest exact value."""
    return [
        float(f"{((own.double() - right).abs().max() / right.abs().max()).item():.3g}")
        for own, right in zip(found, exact, strict=True)
    ]


def poisoned(*shape: int) -> None:
    """Leave NaN in memory that the allocator hands out next."""
    blocks = [torch.full(shape, float("nan"), device="cuda", dtype=BF16) for _ in range(4)]
    del blocks


def bits(experts: int, rows: int, k: int, n: int) -> dict[str, Any]:
    x, weight, grad = sample(experts, rows, k, n)
    offsets = offsets_of(counts_of("balanced", experts, rows))
    graph, static = graph_of(lambda: grouped(x, weight, grad, offsets))
    layer, found = te_layer(experts, weight), {}
    names = ("output", "input gradient", "weight gradient")
    for kind in ("balanced", "uneven", "all to one"):
        counts = counts_of(kind, experts, rows)
        exact = stacked(each(x.double(), weight.double(), grad.double(), counts))
        offsets.copy_(offsets_of(counts))
        for tensor in static:
            tensor.fill_(float("nan"))
        graph.replay()
        poisoned(experts, n, k)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        eager = grouped(x, weight, grad, offsets)
        torch.cuda.set_sync_debug_mode("default")
        again = grouped(x, weight, grad, offsets)
        alone = stacked(each(x, weight, grad, counts))
        found[kind] = {
            "replay is eager": dict(zip(names, map(torch.equal, static, eager), strict=True)),
            "eager is eager": dict(zip(names, map(torch.equal, again, eager), strict=True)),
            "one matmul an expert is the same": dict(zip(names, map(torch.equal, alone, eager), strict=True)),
            "error": dict(zip(names, errors(eager, exact), strict=True)),
            "error, one matmul an expert": dict(zip(names, errors(alone, exact), strict=True)),
        }
        if layer is not None:
            theirs = stacked(te_pass(layer, x, grad, counts))
            found[kind]["error, TransformerEngine"] = dict(zip(names, errors(theirs, exact), strict=True))
            found[kind]["TransformerEngine is one matmul an expert"] = dict(
                zip(names, map(torch.equal, alone, theirs), strict=True)
            )
    return found


def times(experts: int, rows: int, k: int, n: int) -> dict[str, Any]:
    x, weight, grad = sample(experts, rows, k, n)
    # Experts whose weights alternate with those of another layer, as SequentialMLP's parameters do.
    apart = torch.randn(experts, 2, n, k, device="cuda", dtype=BF16)[:, 0]
    layer, found = te_layer(experts, weight), {}
    for kind in ("balanced", "uneven"):
        counts = counts_of(kind, experts, rows)
        offsets = offsets_of(counts)
        calls: dict[str, Callable[[], Any]] = {
            "grouped_mm, forward": partial(forward, x, weight, offsets),
            "grouped_mm, input gradient": partial(input_gradient, grad, weight, offsets),
            "grouped_mm, weight gradient": partial(weight_gradient, x, grad, offsets),
            "grouped_mm, forward, weights apart": partial(forward, x, apart, offsets),
            "grouped_mm": partial(grouped, x, weight, grad, offsets),
            "a matmul an expert": partial(each, x, weight, grad, counts),
            "one matmul of all rows": lambda: (x @ weight[0].t(), grad @ weight[0], grad.t() @ x),
        }
        if layer is not None:
            calls["TransformerEngine, forward"] = partial(layer, x, counts)
            calls["TransformerEngine"] = partial(te_pass, layer, x, grad, counts)
        found[kind] = {name: microseconds(call) for name, call in calls.items()}
        print(kind, found[kind], flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found = {}
    for name, shape in SHAPES.items():
        print(f"{name}: experts, rows, features in, features out: {shape}", flush=True)
        found[name] = {"shape": shape, "bits": bits(*shape), "microseconds": times(*shape)}
        print(found[name]["bits"], flush=True)
    if arguments.output:
        write_results(
            arguments.output, command=command_line("benchmarks/grouped_experts.py", sys.argv[1:]), found=found
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
