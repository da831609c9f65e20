"""The flags of this patch, and the options of a training read from parsed flags or from configurations."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

MEGATRON_FSDP = "--use-megatron-fsdp"
TORCH_FSDP = "--use-torch-fsdp2"
WHOLE_MODEL: Literal["model"] = "model"
ALL_LAYERS: Literal["all"] = "all"
LayersPerGraph = Literal["all", "model", 1]
CAPTURES_FLAG = "--cuda-graph-max-captures"
PACKED_FLAG = "--cuda-graph-packed-sequences"
GROUPED_FLAG = "--moe-use-grouped-tensor"
FACTOR_FLAG = "--moe-alltoall-capacity-factor"
LAYERS_FLAG = "--cuda-graph-layers-per-graph"
_FALLBACK_FLAG = "--cuda-graph-fallback"
# Schedules of sequence lengths or batch sizes have a handful of stages, and each capture takes seconds.
_MAX_CAPTURES = 8


@dataclass(frozen=True)
class Flag:
    """A flag of this patch. Parsed flags and ``TransformerConfig`` have an attribute of its name.

    Attributes:
        help: Its help text.
        default: Its value if it is not given, or if a configuration lacks it.
        allowed: Whether a value other than None is allowed.
        words: What the value must be, for errors.
        needs_graphs: Whether it has no effect without ``--cuda-graph-impl transformer_engine``.
        arguments: Other arguments of ``argparse.ArgumentParser.add_argument``.
    """

    help: str
    default: Any = None
    allowed: Callable[[Any], bool] = lambda value: True
    words: str = ""
    needs_graphs: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)


FLAGS = {
    _FALLBACK_FLAG: Flag(
        "What happens if layers cannot be captured (--cuda-graph-impl transformer_engine): error ends the training "
        "with the layer, the rank and the cause; eager logs a warning and trains on without CUDA graphs.",
        default="error",
        allowed=lambda value: value in ("error", "eager"),
        words="error or eager",
        arguments={"choices": ("error", "eager")},
    ),
    LAYERS_FLAG: Flag(
        "With --use-megatron-fsdp and --cuda-graph-impl transformer_engine: what one CUDA graph holds: "
        f"{ALL_LAYERS} for all consecutive layers, {WHOLE_MODEL} for everything a dense model computes, from tokens to "
        f"losses, or 1 for a single layer. Default: {WHOLE_MODEL} if the steps before capture call the model in a way "
        f"that such graphs can replay, otherwise {ALL_LAYERS}.",
        allowed=lambda value: str(value) in (ALL_LAYERS, WHOLE_MODEL, "1"),
        words=f"{ALL_LAYERS}, {WHOLE_MODEL} or 1",
        arguments={"metavar": f"{ALL_LAYERS}|{WHOLE_MODEL}|1"},
    ),
    PACKED_FLAG: Flag(
        "With --cuda-graph-impl transformer_engine: graphs of attention read where the sequences packed in a "
        "micro-batch begin, at most N of them. Whoever makes the batches pads PackedSeqParams to N sequences with "
        "megatron.core.packed_seq_params.pad_packed_seq_params.",
        allowed=lambda value: value > 0,
        words="a positive number of sequences",
        arguments={"type": int, "metavar": "N"},
    ),
    CAPTURES_FLAG: Flag(
        "With --cuda-graph-impl transformer_engine: how many times graphs are captured, the first time included, as "
        "training changes to other sequence lengths, micro-batch sizes or, under pipeline parallelism, numbers of "
        f"micro-batches (default: {_MAX_CAPTURES}). Afterwards, whatever the graphs do not fit runs eagerly.",
        default=_MAX_CAPTURES,
        allowed=lambda value: value >= 1,
        words="1 or more, the first capture included",
        arguments={"type": int, "metavar": "N"},
    ),
    GROUPED_FLAG: Flag(
        "Experts compute their tokens in one grouped matrix product, and the host does not wait for the number of "
        "tokens of each expert. With --cuda-graph-impl transformer_engine graphs may then hold whole MoE layers. Needs "
        "--bf16 and a GPU of compute capability 9.0 or newer.",
        default=False,
        needs_graphs=False,
        arguments={"action": "store_true"},
    ),
    FACTOR_FLAG: Flag(
        f"With {GROUPED_FLAG} and --moe-token-dispatcher-type alltoall: each rank has room for F times an even share "
        "of its tokens to send to each rank that has experts. A step that needs more runs again, eagerly and with room "
        "for all, before the optimizer's step: nothing is dropped. Default: room for all.",
        allowed=lambda value: value > 0,
        words="above 0, where 1 is an even share of the tokens",
        needs_graphs=False,
        arguments={"type": float, "metavar": "F"},
    ),
    "--cuda-graph-report": Flag(
        "With --cuda-graph-impl transformer_engine: rank 0 writes capture.json to this folder: "
        "captured layers, memory of the graphs, and what runs eagerly.",
        arguments={"metavar": "DIR"},
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this patch to ``parser`` and return it."""
    group = parser.add_argument_group(title="CUDA graphs")
    for name, flag in FLAGS.items():
        group.add_argument(name, help=flag.help, default=flag.default, **flag.arguments)
    return parser


def give_to_config(args: Any, config: Any) -> None:
    """Copy the flags of this patch from ``args`` to a ``TransformerConfig``."""
    for name in FLAGS:
        setattr(config, _attribute(name), given(args, name))


def given(options: Any, name: str) -> Any:
    """Return the value of a flag of this patch in parsed flags or in a configuration."""
    return getattr(options, _attribute(name), FLAGS[name].default)


def goes_on_eagerly(options: Any) -> bool:
    """Whether training continues without graphs if a capture fails."""
    return bool(given(options, _FALLBACK_FLAG) == "eager")


def max_captures(options: Any) -> int:
    """Return how many times graphs are captured, the first time included."""
    return int(given(options, CAPTURES_FLAG))


def layers_per_graph(options: Any) -> LayersPerGraph | None:
    """Return what one graph holds: ``all`` consecutive layers, the whole ``model``, or 1 layer; None if not given."""
    value = given(options, LAYERS_FLAG)
    known: dict[str, LayersPerGraph] = {ALL_LAYERS: ALL_LAYERS, WHOLE_MODEL: WHOLE_MODEL, "1": 1}
    return known.get(str(value))


def packed_sequences(options: Any) -> int | None:
    """Return the number of packed sequences in a micro-batch that graphs of attention read; None if they read none."""
    value: int | None = given(options, PACKED_FLAG)
    return value


def grouped_tensor(options: Any) -> bool:
    """Whether experts compute their tokens in one grouped matrix product, with token counts on the device."""
    return bool(given(options, GROUPED_FLAG))


def alltoall_capacity_factor(options: Any) -> float | None:
    """Return the number of tokens ranks can send each other, relative to an even share; None for all."""
    value: float | None = given(options, FACTOR_FLAG)
    return value


def _attribute(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


class Options:
    """The options of a training, by megatron-core's names.

    Args:
        sources: Validated flags, or ``TransformerConfig`` and ``DistributedDataParallelConfig``. The first source with
            a value counts; an option of no source is not given.
        sharding: The flag that shards the model; None to look for it in ``sources``.
    """

    def __init__(self, *sources: Any, sharding: str | None = None):
        self._sources = sources
        self._sharding = sharding

    def get(self, name: str, default: Any = None) -> Any:
        """Return the option's value; ``default`` if it is None or in no source."""
        for source in self._sources:
            value = getattr(source, name, None)
            if value is not None:
                return value
        return default

    def knows(self, name: str) -> bool:
        """Whether a source has the option, even as None."""
        return any(hasattr(source, name) for source in self._sources)

    def any(self, *names: str) -> bool:
        """Whether one of these options is set, and not to zero."""
        return any(self.get(name) for name in names)

    def several(self, name: str) -> bool:
        """Whether the option is a number above 1."""
        return int(self.get(name, 1)) > 1

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the flags of this patch; configurations may have flags that they do not use."""
        parsed = self.knows("use_megatron_fsdp") and self._sharding is None
        for name, flag in FLAGS.items():
            value = self.get(_attribute(name), flag.default)
            if value is not None and not flag.allowed(value):
                yield f"{name} must be {flag.words}, got {value}"
            # Without graphs the number of packed sequences says how batches are padded, for comparisons.
            allowed = ("transformer_engine", "none") if name == PACKED_FLAG else ("transformer_engine",)
            if parsed and flag.needs_graphs and value != flag.default and self.implementation not in allowed:
                yield (
                    f"{name} {value} needs --cuda-graph-impl transformer_engine, got {self.implementation}: "
                    "leave it out"
                )
        if parsed and self.get(_attribute(LAYERS_FLAG)) and self.sharding != MEGATRON_FSDP:
            yield f"{LAYERS_FLAG} needs --use-megatron-fsdp: leave it out"

    @property
    def sharding(self) -> str | None:
        """The flag that shards the model; None if there is none."""
        if self._sharding is None and self.get("use_megatron_fsdp"):
            return MEGATRON_FSDP
        return TORCH_FSDP if self._sharding is None and self.get("use_torch_fsdp2") else self._sharding

    @property
    def implementation(self) -> str:
        """``none``, ``transformer_engine``, ``local`` or ``full_iteration``, as in ``--cuda-graph-impl``."""
        return str(self.get("cuda_graph_impl", "none"))

    @property
    def modules(self) -> frozenset[str]:
        """The parts of layers in ``--cuda-graph-modules``; empty for whole layers."""
        return frozenset(str(getattr(module, "name", module)) for module in self.get("cuda_graph_modules") or ())

    def graphs(self, *modules: str) -> bool:
        """Whether graphs hold one of these parts of layers."""
        return not self.modules or not self.modules.isdisjoint(modules)

    @property
    def double_buffer(self) -> bool:
        """Whether Megatron-FSDP gathers to fixed buffers, which some flags imply."""
        return self.any("fsdp_double_buffer", "nccl_ub", "megatron_fsdp_max_pool_double_buffer")

    @property
    def has_experts(self) -> bool:
        """Whether there are MoE layers."""
        return self.several("num_experts") or self.several("num_moe_experts")

    @property
    def has_dense_layers(self) -> bool:
        """Whether there are layers without experts."""
        frequency = self.get("moe_layer_freq", 1)
        return not self.has_experts or (0 in frequency if isinstance(frequency, list) else frequency != 1)

    @property
    def pads_experts(self) -> bool:
        """Whether each expert gets the same number of tokens in every step."""
        return bool(self.get("moe_pad_expert_input_to_capacity")) and self.get("moe_expert_capacity_factor") is not None

    @property
    def grouped_tensor(self) -> bool:
        """Whether token counts of experts stay on the device."""
        return bool(self.get("moe_use_grouped_tensor"))

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return int(self.get("pipeline_model_parallel_size", 1))

    @property
    def hybrid_pattern(self) -> str:
        """The kinds of layers of a hybrid model; empty for a GPT."""
        return str(self.get("hybrid_layer_pattern") or self.get("hybrid_override_pattern") or "")

    @property
    def quantizes_otherwise(self) -> bool:
        """Whether there is FP4, or FP8 by a recipe that was not tried in graphs of several layers."""
        return bool(self.get("fp4") or self.fp8_recipe not in ("", "delayed", "tensorwise"))

    @property
    def fp8_recipe(self) -> str:
        """The recipe of FP8; empty without FP8, or if none is given."""
        recipe = self.get("fp8_recipe") if self.get("fp8") else None
        return str(getattr(recipe, "value", recipe) or "")

    @property
    def recomputes_layers(self) -> bool:
        """Whether whole layers are recomputed, which graphs of single layers cannot do."""
        return bool(self.get("recompute_granularity") == "full")

    def recomputes(self, *modules: str) -> bool:
        """Whether one of these modules is selected for recomputation."""
        selected = self.get("recompute_modules", ["core_attn"])
        return self.get("recompute_granularity") == "selective" and not {*modules}.isdisjoint(selected)
