"""Does TransformerEngine's attention take the same kernels under capture as eagerly?

    python benchmarks/attention_under_capture.py --output benchmarks/results/attention_under_capture.json

Runs ``DotProductAttention`` (bf16, causal, 4 heads, batch 2) twice eagerly and once with the capture flag
set that every capture sets, and compares output and gradients bit for bit. Where they differ, a graphed layer cannot
have the bits of an eager one, whichever engine captures it.
"""

import argparse
import json
import platform
from importlib.metadata import version
from pathlib import Path

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch import graph

SEQUENCES = (32, 64, 96, 100, 128, 192, 256, 320, 384, 512, 513, 640, 1000, 1024, 1536, 2048)
HEAD_SIZES = (64, 128)


def results_of(attention: te.DotProductAttention, inputs: list[torch.Tensor], flag: bool) -> list[torch.Tensor]:
    """Return output and input gradients of one pass."""
    if flag:
        graph.set_capture_start()
    try:
        output = attention(*inputs)
    finally:
        if flag:
            graph.set_capture_end()
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), inputs)]


def main() -> None:
    """Print and write one row for each sequence length and head size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for sequence in SEQUENCES:
        for head_size in HEAD_SIZES:
            attention = te.DotProductAttention(
                4, head_size, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal"
            ).cuda()
            inputs = [
                torch.randn(sequence, 2, 4, head_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            ]
            eager, again, captured = (results_of(attention, inputs, flag) for flag in (False, False, True))
            rows.append(
                {
                    "sequence": sequence,
                    "head_size": head_size,
                    "eager_repeats": all(map(torch.equal, eager, again)),
                    "capture_equals_eager": all(map(torch.equal, eager, captured)),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    if args.output:
        report = {
            "command": "python benchmarks/attention_under_capture.py --output FILE",
            "hardware": torch.cuda.get_device_name(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__}
            | {"transformer-engine": version("transformer-engine"), "cudnn": torch.backends.cudnn.version()},
            "results": rows,
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
