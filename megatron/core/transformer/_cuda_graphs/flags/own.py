"""The flags of CUDA graphs that megatron-core does not have.

Each is an attribute of its name of parsed flags, and of a ``TransformerConfig``, which may lack it.
"""

import argparse
from typing import Any, Literal

from ..errors import OptionsError

FALLBACKS = ("error", "eager")
WHOLE_MODEL: Literal["model"] = "model"
ALL_LAYERS: Literal["all"] = "all"
LayersPerGraph = Literal["all", "model", 1]
CAPTURES_FLAG = "--cuda-graph-max-captures"
PACKED_FLAG = "--cuda-graph-packed-sequences"
GROUPED_FLAG = "--moe-use-grouped-tensor"
FACTOR_FLAG = "--moe-alltoall-capacity-factor"
_FALLBACK_FLAG = "--cuda-graph-fallback"
LAYERS_FLAG = "--cuda-graph-layers-per-graph"
# A schedule of sequence lengths or batch sizes has a handful of stages; what changes more often would gain little from
# graphs, and each capture takes seconds.
_MAX_CAPTURES = 8
# By the flag, what argparse is told of it.
_FLAGS: dict[str, dict[str, Any]] = {
    _FALLBACK_FLAG: {
        "choices": FALLBACKS,
        "default": FALLBACKS[0],
        "help": "What happens if the layers cannot be captured (--cuda-graph-impl transformer_engine): error ends the "
        "training with the layer, the rank and the cause; eager warns of the same and trains on without CUDA graphs.",
    },
    LAYERS_FLAG: {
        "metavar": f"{ALL_LAYERS}|{WHOLE_MODEL}|1",
        "help": "With --use-megatron-fsdp and --cuda-graph-impl transformer_engine: what is recorded in one CUDA "
        f"graph: {ALL_LAYERS} for {ALL_LAYERS} consecutive layers, {WHOLE_MODEL} for all that a dense model computes, "
        f"from tokens to losses, or 1 for a graph of each layer. Default: {WHOLE_MODEL} if the steps before capture "
        f"call the model as such graphs can be replayed, otherwise {ALL_LAYERS}.",
    },
    PACKED_FLAG: {
        "type": int,
        "metavar": "N",
        "help": "With --cuda-graph-impl transformer_engine: graphs of attention read where the sequences begin that "
        "are packed in a micro-batch, at most N of them. Whoever makes the batches pads PackedSeqParams to N "
        "sequences, by megatron.core.packed_seq_params.pad_packed_seq_params.",
    },
    CAPTURES_FLAG: {
        "type": int,
        "metavar": "N",
        "default": _MAX_CAPTURES,
        "help": "With --cuda-graph-impl transformer_engine: how many times graphs are captured, the first time "
        "included, as training changes to other sequence lengths, micro-batch sizes or, under pipeline parallelism, "
        f"numbers of micro-batches (default: {_MAX_CAPTURES}). From then on what the graphs do not fit runs eagerly.",
    },
    GROUPED_FLAG: {
        "action": "store_true",
        "default": False,
        "help": "Experts compute their tokens in one grouped matrix product, and the host does not wait for how many "
        "tokens each expert gets. With --cuda-graph-impl transformer_engine graphs may then hold whole MoE layers. "
        "Needs --bf16 and a GPU of compute capability 9.0 or newer.",
    },
    FACTOR_FLAG: {
        "type": float,
        "metavar": "F",
        "help": f"With {GROUPED_FLAG} and --moe-token-dispatcher-type alltoall: each rank has room for F times an even "
        "share of its tokens to send to each rank that has experts. A step in which that is too little is run again, "
        "eagerly and with room for all, before the optimizer's step: nothing is dropped. Default: room for all.",
    },
    "--cuda-graph-report": {
        "metavar": "DIR",
        "help": "With --cuda-graph-impl transformer_engine: rank 0 writes capture.json and capture.html to this "
        "folder: what was captured in which order, its time and memory, and what stays eager.",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to ``parser`` and return it."""
    group = parser.add_argument_group(title="CUDA graphs")
    for flag, options in _FLAGS.items():
        group.add_argument(flag, **options)
    return parser


def check_arguments(args: Any) -> None:
    """Check the values of the flags, and that the parsed ``args`` have graphs that they are about.

    Raises:
        ValueError: names the flag.
    """
    check_values(args)
    for flag in _FLAGS:
        value = _given(args, flag)
        # Without graphs the number of packed sequences says how batches are padded, for comparisons.
        without = flag in (GROUPED_FLAG, FACTOR_FLAG) or (args.cuda_graph_impl == "none" and flag == PACKED_FLAG)
        if value != _default(flag) and args.cuda_graph_impl != "transformer_engine" and not without:
            raise ValueError(
                f"{flag} {value} needs --cuda-graph-impl transformer_engine, got {args.cuda_graph_impl}: leave it out"
            )
    if layers_per_graph(args) is not None and not args.use_megatron_fsdp:
        raise ValueError(f"{LAYERS_FLAG} needs --use-megatron-fsdp: leave it out")


def check_values(options: Any) -> None:
    """Check the values of the flags in parsed flags or in a configuration.

    Raises:
        ValueError: names the flag.
    """
    fallback = _given(options, _FALLBACK_FLAG)
    if fallback not in FALLBACKS:
        raise OptionsError(f"{_FALLBACK_FLAG} must be one of {FALLBACKS}, got {fallback!r}")
    layers_per_graph(options)
    max_captures(options)
    packed_sequences(options)
    alltoall_capacity_factor(options)


def give_to_config(args: Any, config: Any) -> None:
    """Let the ``TransformerConfig`` of a model have what ``args`` say."""
    for flag in _FLAGS:
        setattr(config, _attribute(flag), _given(args, flag))


def goes_on_eagerly(options: Any) -> bool:
    """Whether training goes on without graphs if a capture fails, according to flags or a configuration."""
    return _given(options, _FALLBACK_FLAG) == "eager"


def max_captures(options: Any) -> int:
    """How many times graphs are captured, the first time included, according to flags or a configuration.

    Raises:
        ValueError: not a positive integer; names the flag.
    """
    given: int = _given(options, CAPTURES_FLAG)
    if given < 1:
        raise ValueError(f"{CAPTURES_FLAG} must be 1 or more, the first capture included, got {given}")
    return given


def layers_per_graph(options: Any) -> LayersPerGraph | None:
    """What one graph holds: ``all`` consecutive layers, the whole ``model``, or 1 layer; None if nothing is said.

    Raises:
        OptionsError: it is something else; names the flag.
    """
    given = _given(options, LAYERS_FLAG)
    known: dict[str, LayersPerGraph] = {ALL_LAYERS: ALL_LAYERS, WHOLE_MODEL: WHOLE_MODEL, "1": 1}
    if given is None or str(given) in known:
        return known.get(str(given))
    raise OptionsError(f"{LAYERS_FLAG} {given} is not supported: use {ALL_LAYERS}, {WHOLE_MODEL} or 1")


def packed_sequences(options: Any) -> int | None:
    """How many packed sequences of a micro-batch graphs of attention read; None if they read none.

    Raises:
        ValueError: the number is not positive.
    """
    given: int | None = _given(options, PACKED_FLAG)
    if given is not None and given < 1:
        raise ValueError(f"{PACKED_FLAG} must be a positive number of sequences, got {given}")
    return given


def grouped_tensor(options: Any) -> bool:
    """Whether experts compute their tokens in one grouped matrix product, by counts that the device knows."""
    return bool(_given(options, GROUPED_FLAG))


def alltoall_capacity_factor(options: Any) -> float | None:
    """Return for how many tokens ranks have room to send each other, relative to an even share; None for all.

    Raises:
        OptionsError: it is not positive.
    """
    given: float | None = _given(options, FACTOR_FLAG)
    if given is not None and not given > 0:
        raise OptionsError(f"{FACTOR_FLAG} must be above 0, where 1 is an even share of the tokens, got {given:g}")
    return given


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _default(flag: str) -> Any:
    return _FLAGS[flag].get("default")


def _given(options: Any, flag: str) -> Any:
    return getattr(options, _attribute(flag), _default(flag))
