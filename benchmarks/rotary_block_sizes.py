"""Count the launches of the fused rotary kernels of multi-latent attention whose results are wrong.

    python benchmarks/rotary_block_sizes.py --processes 6 --output FILE

For each number of heads and of rotated elements it launches the kernel for gradients of queries as megatron-core can
(with each ``BLOCK_H`` that its autotuner may choose) and as this project does. A result is wrong if it differs from
that of torch by more than the rounding of bfloat16. Several processes, and a second stream in each, vary the timing.
The exit code is 1 if a launch of this project's was wrong. Needs a GPU.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.results_file import command_line, write_results  # noqa: E402
from megatron.core.fusions import fused_mla_yarn_rope_apply as rotary  # noqa: E402

TOKENS, PLAIN = 512, 64
SHAPES = ((16, 32), (16, 64), (128, 64), (24, 64), (12, 32), (7, 64), (40, 128))  # heads, rotated elements of each
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)  # those that megatron-core times
OURS = 0


def expected(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the gradient of queries before rotation, computed by torch.

    Args:
        grad: The gradient after it, ``[tokens, heads, PLAIN + rotated]``; rotated elements are left and right halves.
        cos, sin: float32 ``[tokens, 1, rotated]``.
    """
    result, half = grad.clone(), cos.shape[-1] // 2
    left, right = grad[..., PLAIN : PLAIN + half].float(), grad[..., PLAIN + half :].float()
    result[..., PLAIN::2] = left * cos[..., :half] + right * sin[..., half:]
    result[..., PLAIN + 1 :: 2] = right * cos[..., half:] - left * sin[..., :half]
    return result


def launcher(block: int) -> Callable[..., None]:
    """Return a function that launches the kernel with ``block`` heads per program, or as this project does."""

    def launch(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        tokens, heads, _ = grad.shape
        own = rotary.rotary_bwd_q_kernel
        kernel, options = (own, {}) if block == OURS else (own.fn, {"BLOCK_H": block})
        grid = lambda meta: (tokens, -(-heads // meta["BLOCK_H"]))  # noqa: E731
        strides = grad.stride(0), grad.stride(1)
        kernel[grid](grad, cos, sin, PLAIN, cos.shape[-1], heads, 1, None, None, *strides, 0, 1, **options)

    return launch


def wrong_launches(heads: int, rotated: int, block: int, launches: int) -> int:
    """Return how many of ``launches`` have a wrong result, beside other work on the GPU."""
    cos, sin = torch.randn(2, TOKENS, 1, rotated, device="cuda")
    # What lies behind the tensor must stay as it is too.
    grad = torch.randn(TOKENS + 1, heads, PLAIN + rotated, device="cuda").bfloat16()
    right = torch.cat([expected(grad[:TOKENS], cos, sin), grad[TOKENS:]]).float()
    bound = 0.02 * right.abs() + 0.02
    side, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda").bfloat16()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    launch = launcher(block)
    for number in range(launches):
        with torch.cuda.stream(side):
            size = 64 << number % 6
            matrix[:size, :size] @ matrix[:size, :size]
        result = grad.clone()
        launch(result[:TOKENS], cos, sin)
        wrong += ((result.float() - right).abs() > bound).any()
    return int(wrong)


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=500, help="of each kernel")
    parser.add_argument("--processes", type=int, default=1, help="that launch side by side; the first one reports")
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    args = parser.parse_args()
    command = [sys.executable, __file__, "--launches", str(args.launches)]
    others = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(args.processes - 1)]
    found = {}
    for heads, rotated in SHAPES:
        # Blocks that do not divide the heads write outside of the tensor.
        blocks = [block for block in BLOCKS if block >= heads or heads % block == 0]
        counts = {block: wrong_launches(heads, rotated, block, args.launches) for block in (OURS, *blocks)}
        found[f"{heads} heads, {rotated} rotated"] = {"ours": counts.pop(OURS)} | {
            f"BLOCK_H {b}": n for b, n in counts.items()
        }
        print(f"{heads} heads, {rotated} rotated elements:", found[f"{heads} heads, {rotated} rotated"], flush=True)
    codes = [each.wait() for each in others]
    if args.output:
        command_run = command_line("benchmarks/rotary_block_sizes.py", sys.argv[1:])
        write_results(args.output, command=command_run, launches=args.launches, wrong=found)
    return int(any(counts["ours"] for counts in found.values()) or any(codes))


if __name__ == "__main__":
    sys.exit(main())
