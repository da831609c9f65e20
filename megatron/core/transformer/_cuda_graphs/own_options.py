"""Flags of per-layer CUDA graphs that megatron-core does not have: ``--cuda-graph-fallback``,
``--cuda-graph-layers-per-graph``, ``--cuda-graph-packed-sequences``, ``--cuda-graph-max-captures`` and
``--cuda-graph-report``.

A configuration has them as attributes ``cuda_graph_fallback``, ``cuda_graph_layers_per_graph``,
``cuda_graph_packed_sequences``, ``cuda_graph_max_captures`` and ``cuda_graph_report``, or lacks them.
"""

import argparse
from typing import Any, Literal

from .errors import OptionsError

FALLBACKS = ("error", "eager")
WHOLE_MODEL: Literal["model"] = "model"
ALL_LAYERS: Literal["all"] = "all"
CAPTURES_FLAG = "--cuda-graph-max-captures"
LayersPerGraph = Literal["all", "model", 1]
_LAYERS_FLAG = "--cuda-graph-layers-per-graph"
PACKED_FLAG = "--cuda-graph-packed-sequences"
# A schedule of sequence lengths or batch sizes has a handful of stages; what changes more often would gain little from
# graphs, and each capture takes seconds.
_MAX_CAPTURES = 8


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to ``parser`` and return it."""
    group = parser.add_argument_group(title="CUDA graphs")
    group.add_argument(
        "--cuda-graph-fallback",
        choices=FALLBACKS,
        default=FALLBACKS[0],
        help="What happens if the layers cannot be captured (--cuda-graph-impl transformer_engine): error ends the "
        "training with the layer, the rank and the cause; eager warns of the same and trains on without CUDA graphs.",
    )
    group.add_argument(
        _LAYERS_FLAG,
        metavar=f"{ALL_LAYERS}|{WHOLE_MODEL}|1",
        help="With --use-megatron-fsdp and --cuda-graph-impl transformer_engine: what is recorded in one CUDA graph: "
        f"{ALL_LAYERS} for {ALL_LAYERS} consecutive layers, {WHOLE_MODEL} for all that a dense model computes, from "
        "tokens to losses, or 1 for a graph of each layer. "
        f"Default: {WHOLE_MODEL} if the steps before capture call the model as such graphs can be replayed, otherwise "
        f"{ALL_LAYERS}.",
    )
    group.add_argument(
        PACKED_FLAG,
        type=int,
        metavar="N",
        help="With --cuda-graph-impl transformer_engine: graphs of attention read where the sequences begin that are "
        "packed in a micro-batch, at most N of them. Whoever makes the batches pads PackedSeqParams to N sequences, by "
        "megatron.core.packed_seq_params.pad_packed_seq_params.",
    )
    group.add_argument(
        CAPTURES_FLAG,
        type=int,
        default=_MAX_CAPTURES,
        metavar="N",
        help="With --cuda-graph-impl transformer_engine: how many times graphs are captured, the first time included, "
        "as training changes to other sequence lengths, micro-batch sizes or, under pipeline parallelism, numbers of "
        f"micro-batches (default: {_MAX_CAPTURES}). From then on what the graphs do not fit runs eagerly.",
    )
    group.add_argument(
        "--cuda-graph-report",
        metavar="DIR",
        help="With --cuda-graph-impl transformer_engine: rank 0 writes capture.json and capture.html to this folder: "
        "what was captured in which order, its time and memory, and what stays eager.",
    )
    return parser


def check_arguments(args: Any) -> None:
    """Check that the parsed ``args`` have graphs that the flags are about.

    Raises:
        ValueError: names the flags.
    """
    fallback, report = getattr(args, "cuda_graph_fallback", FALLBACKS[0]), getattr(args, "cuda_graph_report", None)
    # Without graphs the number of packed sequences says how batches are padded, for comparisons.
    packed = packed_sequences(args) is not None and args.cuda_graph_impl != "none"
    for flag, is_given in (
        (PACKED_FLAG, packed),
        (f"--cuda-graph-fallback {fallback}", fallback != FALLBACKS[0]),
        (CAPTURES_FLAG, max_captures(args) != _MAX_CAPTURES),
        (f"--cuda-graph-report {report}", report is not None),
    ):
        if is_given and args.cuda_graph_impl != "transformer_engine":
            raise ValueError(
                f"{flag} needs --cuda-graph-impl transformer_engine, got {args.cuda_graph_impl}: leave it out"
            )
    if layers_per_graph(args) is None:
        return
    if not args.use_megatron_fsdp or args.cuda_graph_impl != "transformer_engine":
        raise ValueError(
            f"{_LAYERS_FLAG} needs --use-megatron-fsdp and --cuda-graph-impl transformer_engine: leave it out"
        )


def give_to_config(args: Any, config: Any) -> None:
    """Let the ``TransformerConfig`` of a model have what ``args`` say."""
    config.cuda_graph_fallback = getattr(args, "cuda_graph_fallback", FALLBACKS[0])
    config.cuda_graph_layers_per_graph = getattr(args, "cuda_graph_layers_per_graph", None)
    config.cuda_graph_packed_sequences = getattr(args, "cuda_graph_packed_sequences", None)
    config.cuda_graph_report = getattr(args, "cuda_graph_report", None)
    config.cuda_graph_max_captures = max_captures(args)


def max_captures(options: Any) -> int:
    """How many times graphs are captured, the first time included, according to flags or a configuration.

    Raises:
        ValueError: not a positive integer; names the flag.
    """
    given: int = getattr(options, "cuda_graph_max_captures", _MAX_CAPTURES)
    if given < 1:
        raise ValueError(f"{CAPTURES_FLAG} must be 1 or more, the first capture included, got {given}")
    return given


def layers_per_graph(config: Any) -> LayersPerGraph | None:
    """What one graph holds: ``all`` consecutive layers, the whole ``model``, or 1 layer; None if nothing is said.

    Raises:
        OptionsError: it is something else; names the flag.
    """
    given = getattr(config, "cuda_graph_layers_per_graph", None)
    known: dict[str, LayersPerGraph] = {ALL_LAYERS: ALL_LAYERS, WHOLE_MODEL: WHOLE_MODEL, "1": 1}
    if given is None or str(given) in known:
        return known.get(str(given))
    raise OptionsError(f"{_LAYERS_FLAG} {given} is not supported: use {ALL_LAYERS}, {WHOLE_MODEL} or 1")


def packed_sequences(config: Any) -> int | None:
    """How many packed sequences of a micro-batch graphs of attention read; None if they read none.

    Raises:
        ValueError: the number is not positive.
    """
    given: int | None = getattr(config, "cuda_graph_packed_sequences", None)
    if given is not None and given < 1:
        raise ValueError(f"{PACKED_FLAG} must be a positive number of sequences, got {given}")
    return given
