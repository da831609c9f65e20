"""Host time of a replay and memory of a graph: this project's engine, TransformerEngine's and torch's.

    python benchmarks/replay_overhead.py --output replay_overhead.json

Captures 1, 8 and 64 tiny layers in a row with each engine in turn and times, on the host alone, their forward and their
backward replays: the GPU has next to nothing to do, so this is what an engine costs in Python, autograd and the driver.
Then captures larger layers and takes the bytes that the allocator holds more than before. Ratios are to
TransformerEngine's engine, or to torch's where TransformerEngine is not there. All engines capture the same layers, in
the same order of passes where they take one, and share buffers where they can. "autograd alone" is a function of the
same inputs that does nothing: with one layer most of a backward pass is the start of autograd's engine.

Needs a GPU; on the CPU backend (``python -m megatron_fsdp_cuda_graphs.cpu_backend benchmarks/replay_overhead.py``) it
runs without TransformerEngine, to show that it works: its times there are a tape's and its memory is not known.
"""

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables

Graphed = Sequence[Callable[[torch.Tensor], torch.Tensor]]

ROOT = Path(__file__).resolve().parents[1]
FLOOR = "autograd alone"


def transformer_engine() -> Callable | None:
    """Return TransformerEngine's ``make_graphed_callables``, or None without TransformerEngine."""
    try:
        from transformer_engine.pytorch.graph import make_graphed_callables as theirs
    except Exception:  # a wheel without a CUDA driver fails in many ways
        return None
    return theirs


def layers(count: int, hidden: int) -> tuple[torch.nn.Module, ...]:
    """Two linear layers around a GELU, ``count`` times."""
    return tuple(
        torch.nn.Sequential(torch.nn.Linear(hidden, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, hidden)).cuda()
        for _ in range(count)
    )


def inputs(count: int, rows: int, hidden: int) -> list[tuple[torch.Tensor]]:
    """Static inputs ``[rows, hidden]``, one for each layer."""
    return [(torch.randn(rows, hidden, device="cuda", requires_grad=True),) for _ in range(count)]


def ordered(capture: Callable) -> Callable[[tuple, list], Graphed]:
    """Capture as the layers of one model chunk, with shared buffers."""

    def run(modules: tuple, samples: list) -> Graphed:
        return capture(
            modules,
            tuple(samples),
            _order=[1, -1],
            _num_layers_per_chunk=[len(modules)],
            _reuse_graph_input_output_buffers=True,
            allow_unused_input=True,
            clone_param_grads_on_return=False,
        )

    return run


def engines() -> dict[str, Callable[[tuple, list], Graphed]]:
    """Every engine that is there, by name; the first one is what the others are compared with."""
    theirs = transformer_engine()
    found = {"transformer_engine": ordered(theirs)} if theirs else {}
    found["torch"] = lambda modules, samples: torch.cuda.make_graphed_callables(modules, tuple(samples))
    found["native"] = ordered(make_graphed_callables)
    return found


class _Nothing(torch.autograd.Function):
    """What autograd costs alone: a function of the same inputs that does nothing."""

    @staticmethod
    def forward(ctx, x, *params):
        ctx.count = len(params)
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad, *[None] * ctx.count


def autograd_alone(count: int, hidden: int) -> Graphed:
    """Callables that return their input, with autograd."""
    modules = layers(count, hidden)
    return [functools.partial(_apply_nothing, tuple(module.parameters())) for module in modules]


def _apply_nothing(params: tuple[torch.Tensor, ...], x: torch.Tensor) -> torch.Tensor:
    return _Nothing.apply(x, *params)


def host_times(graphed: Graphed, hidden: int, repeats: int) -> tuple[float, float]:
    """Median microseconds of host time for one layer's forward and for its backward replay, layers in a row."""
    x = torch.randn(8, hidden, device="cuda", requires_grad=True)
    gradient = torch.ones_like(x)
    forward, backward = [], []
    for _ in range(repeats + 1):
        y = x
        torch.cuda.synchronize()
        start = time.perf_counter()
        for layer in graphed:
            y = layer(y)
        forward.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        start = time.perf_counter()
        y.backward(gradient, inputs=[x])
        backward.append(time.perf_counter() - start)
        x.grad = None
    scale = 1e6 / len(graphed)
    return statistics.median(forward[1:]) * scale, statistics.median(backward[1:]) * scale


def held(make: Callable[[], Graphed]) -> tuple[Graphed, int]:
    """What ``make`` returns, and the bytes that the allocator holds for it."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    made = make()
    gc.collect()
    torch.cuda.empty_cache()
    return made, torch.cuda.memory_reserved() - before


def main() -> None:
    """Measure every engine in several rounds, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--callables", type=int, nargs="+", default=[1, 8, 64], help="how many layers to time")
    parser.add_argument("--repeats", type=int, default=50, help="timed passes over all layers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=16, help="width of the layers that are timed")
    parser.add_argument("--memory-layers", type=int, default=8)
    parser.add_argument("--memory-hidden", type=int, default=2048, help="width and rows of those that are weighed")
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    args = parser.parse_args()

    rows = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for round_number in range(args.rounds):
            for count in args.callables:
                for name, capture in (engines() | {FLOOR: None}).items():
                    if capture is None:
                        graphed = autograd_alone(count, args.hidden)
                    else:
                        graphed = capture(layers(count, args.hidden), inputs(count, 8, args.hidden))
                    forward, backward = host_times(graphed, args.hidden, args.repeats)
                    rows.append(
                        {
                            "round": round_number,
                            "engine": name,
                            "callables": count,
                            "forward_us": round(forward, 2),
                            "backward_us": round(backward, 2),
                        }
                    )
                    del graphed
        weights = []
        for name, capture in engines().items():
            modules = layers(args.memory_layers, args.memory_hidden)
            samples = inputs(args.memory_layers, args.memory_hidden, args.memory_hidden)
            graphed, size = held(functools.partial(capture, modules, samples))
            weights.append({"engine": name, "bytes_per_callable": size // args.memory_layers})
            del graphed, modules, samples

    reference = next(iter(engines()))
    print(f"{'callables':>9}  {'engine':<20}{'forward us':>12}{'backward us':>13}   ratio to {reference}")
    for count in args.callables:
        medians = {
            name: [
                statistics.median(r[key] for r in rows if r["engine"] == name and r["callables"] == count)
                for key in ("forward_us", "backward_us")
            ]
            for name in [*engines(), FLOOR]
        }
        for name, (forward, backward) in medians.items():
            ratio = (forward + backward) / sum(medians[reference])
            print(f"{count:>9}  {name:<20}{forward:>12.1f}{backward:>13.1f}   {ratio:.2f}")
    for weight in weights:
        print(f"{weight['engine']:<20} {weight['bytes_per_callable'] / 2**20:.1f} MiB per callable")
    if args.output:
        sys.path.insert(0, str(ROOT))
        from benchmarks.results_file import write_results

        command = f"python benchmarks/replay_overhead.py --rounds {args.rounds} --repeats {args.repeats}"
        write_results(args.output, command=command, host_time=rows, memory=weights)


if __name__ == "__main__":
    main()
