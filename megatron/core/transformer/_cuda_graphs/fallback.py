"""``--cuda-graph-fallback``: what a capture that fails does."""

import argparse
from typing import Any

FALLBACKS = ("error", "eager")


def add_fallback_argument(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flag to ``parser`` and return it."""
    parser.add_argument_group(title="CUDA graphs").add_argument(
        "--cuda-graph-fallback",
        choices=FALLBACKS,
        default=FALLBACKS[0],
        help="What happens if the layers cannot be captured (--cuda-graph-impl transformer_engine): error ends the "
        "training with the layer, the rank and the cause; eager warns of the same and trains on without CUDA graphs.",
    )
    return parser


def check_fallback(args: Any) -> None:
    """Check that the parsed ``args`` have graphs for which there is a fallback.

    Raises:
        ValueError: names the flags.
    """
    fallback = getattr(args, "cuda_graph_fallback", FALLBACKS[0])
    if fallback != FALLBACKS[0] and args.cuda_graph_impl != "transformer_engine":
        raise ValueError(
            f"--cuda-graph-fallback {fallback} needs --cuda-graph-impl transformer_engine, got "
            f"{args.cuda_graph_impl}: leave it out"
        )
