"""What casting main weights to FP8 parameters takes of a step, with and without the transposes that nobody reads.

    python benchmarks/fp8_shards.py --output FILE

After the optimizer's step TransformerEngine (``cast_master_weights_to_fp8``) casts each parameter's shard as one long
row. Its quantizer is that of the parameter and may ask for the transpose too, which a shard has no place for: on GPUs
whose FP8 products need transposed operands it is computed and thrown away. Takes the parameters of ``step_time.py``'s
A, by shape; medians in ms, by events. Whether both give the same bytes is compared. Needs a GPU and TransformerEngine.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.results_file import command_line, write_results  # noqa: E402

LAYERS = 16
SHAPES = ((6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192))  # of a layer: attention's two, the MLP's two
TIMES = 10


def cast(shape: tuple[int, int], *, columnwise: bool) -> tuple[float, list[torch.Tensor]]:
    """Return what one cast of a whole parameter takes, in ms; its bytes, one for each element; the maximum it found."""
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    weight = torch.randn(1, shape[0] * shape[1], device="cuda", dtype=torch.bfloat16)
    scale, amax = (torch.full((1,), value, device="cuda") for value in (64.0, 0.0))
    quantizer = te.Float8Quantizer(scale, amax, te.DType.kFloat8E4M3, rowwise=True, columnwise=columnwise)
    data = torch.empty(weight.shape, device="cuda", dtype=torch.uint8)
    taken = []
    for _ in range(TIMES + 1):
        shard = quantizer.create_tensor_from_data(data, torch.bfloat16)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        quantizer.update_quantized(weight, shard)
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end))
    return statistics.median(taken[1:]), [data, amax]


def main() -> None:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        with_transpose, one = cast(shape, columnwise=True)
        without, other = cast(shape, columnwise=False)
        times = {"with_transpose_ms": round(with_transpose, 3), "without_ms": round(without, 3)}
        rows.append({"shape": list(shape), **times, "equal": all(map(torch.equal, one, other))})
        print(rows[-1], flush=True)
    step = {name: round(LAYERS * sum(row[name] for row in rows), 1) for name in ("with_transpose_ms", "without_ms")}
    print(f"{LAYERS} layers: {step}")
    if args.output:
        write_results(
            args.output, command=command_line("benchmarks/fp8_shards.py", sys.argv[1:]), parameters=rows, step=step
        )


if __name__ == "__main__":
    main()
