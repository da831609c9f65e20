"""How long capture takes, and what memory it holds: this project's engine and TransformerEngine's.

    python benchmarks/capture_time.py --output benchmarks/results/capture_time.json

Captures 16 and 64 transformer-like layers (hidden 1024, 512 tokens, bf16; TransformerEngine's if it is there, plain
torch modules if not) with each engine in turn, as the layers of one model chunk with shared buffers, and takes the
seconds until all graphs are there and the bytes that the allocator holds more than before. Both engines capture the
same kind of layers after the same number of warm-up iterations.

Needs a GPU; on the CPU backend (``python -m megatron_fsdp_cuda_graphs.cpu_backend benchmarks/capture_time.py``) it runs
without TransformerEngine, to show that it works: what a tape takes says nothing of a GPU, and its memory is not
known.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables


class PlainLayer(torch.nn.Module):
    """A transformer layer of torch's modules: takes and returns ``[sequence, batch, hidden]``."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self._heads = heads
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.qkv, self.projection = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(hidden, 4 * hidden), torch.nn.GELU(), torch.nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the MLP, each with a residual connection."""
        sequence, batch, hidden = x.shape
        heads = self.qkv(self.before_attention(x)).view(sequence, batch, self._heads, -1).permute(1, 2, 0, 3)
        q, k, v = heads.chunk(3, dim=-1)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(dim=-1)
        x = x + self.projection((weights @ v).permute(2, 0, 1, 3).reshape(sequence, batch, hidden))
        return x + self.mlp(self.before_mlp(x))


def transformer_engine() -> Callable | None:
    """Return TransformerEngine's ``make_graphed_callables``, or None without TransformerEngine."""
    try:
        from transformer_engine.pytorch.graph import make_graphed_callables as theirs
    except Exception:  # a wheel without a CUDA driver fails in many ways
        return None
    return theirs


def layers(count: int, hidden: int) -> tuple[torch.nn.Module, ...]:
    """New layers in bf16."""
    heads = max(1, hidden // 64)
    if transformer_engine() is None:
        return tuple(PlainLayer(hidden, heads).cuda().bfloat16() for _ in range(count))
    from transformer_engine.pytorch import TransformerLayer

    return tuple(
        TransformerLayer(hidden, 4 * hidden, heads, params_dtype=torch.bfloat16, hidden_dropout=0, attention_dropout=0)
        for _ in range(count)
    )


def engines() -> dict[str, Callable]:
    """Every engine that is there."""
    theirs = transformer_engine()
    return ({"transformer_engine": theirs} if theirs else {}) | {"native": make_graphed_callables}


def measure(capture: Callable, count: int, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of one capture of ``count`` layers, and MiB that the allocator holds for it."""
    modules = layers(count, args.hidden)
    shape = (args.sequence, 1, args.hidden)
    samples = tuple((torch.randn(*shape, dtype=torch.bfloat16, device="cuda", requires_grad=True),) for _ in modules)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    start = time.perf_counter()
    graphed = capture(
        modules,
        samples,
        num_warmup_iters=args.warmup,
        allow_unused_input=True,
        _order=[1, -1],
        _num_layers_per_chunk=[count],
        _reuse_graph_input_output_buffers=True,
    )
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    gc.collect()
    torch.cuda.empty_cache()
    reserved = (torch.cuda.memory_reserved() - before) / 2**20
    del graphed
    return {"seconds": round(seconds, 4), "reserved_MiB": round(reserved, 1)}


def main() -> None:
    """Measure every engine in several rounds, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=512, help="tokens")
    parser.add_argument("--warmup", type=int, default=3, help="warm-up iterations")
    parser.add_argument("--rounds", type=int, default=3, help="timed captures of each engine and count")
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    rows: list[dict[str, Any]] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for capture in engines().values():
            measure(capture, 2, args)
        for round_number in range(args.rounds):
            for count in args.layers:
                for name, capture in engines().items():
                    figures = measure(capture, count, args)
                    rows.append({"round": round_number, "layers": count, "engine": name} | figures)

    print(f"{'layers':>6}  {'engine':<22}{'seconds':>9}{'reserved MiB':>14}")
    for count in args.layers:
        for name in engines():
            of_engine = [row for row in rows if row["layers"] == count and row["engine"] == name]
            seconds = statistics.median(row["seconds"] for row in of_engine)
            reserved = statistics.median(row["reserved_MiB"] for row in of_engine)
            print(f"{count:>6}  {name:<22}{seconds:>9.3f}{reserved:>14.1f}")
    if args.output:
        from benchmarks.results_file import write_results

        arguments = {name: value for name, value in vars(args).items() if name != "output"}
        write_results(args.output, command="python benchmarks/capture_time.py", arguments=arguments, captures=rows)


if __name__ == "__main__":
    main()
