"""Define this patch's flags, and read options from parsed flags or configurations."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

MEGATRON_FSDP = "--use-megatron-fsdp"
TORCH_FSDP = "--use-torch-fsdp2"
WHOLE_MODEL: Literal["model"] = "model"
LayersPerGraph = Literal["model", 1]
PACKED_FLAG = "--cuda-graph-packed-sequences"
GROUPED_FLAG = "--moe-use-grouped-tensor"
FACTOR_FLAG = "--moe-alltoall-capacity-factor"
LAYERS_FLAG = "--cuda-graph-layers-per-graph"
_FALLBACK_FLAG = "--cuda-graph-fallback"


@dataclass(frozen=True)
class Flag:
    """A flag of this patch. Its value is an attribute of parsed flags and of ``TransformerConfig``.

    Attributes:
        help: Help text.
        default: Default value, also used for configurations without the attribute.
        allowed: Predicate for values other than None.
        words: Description of the allowed values, for errors.
        needs_graphs: Whether the flag needs ``--cuda-graph-impl transformer_engine``.
        arguments: Additional arguments for ``argparse.ArgumentParser.add_argument``.
    """

    help: str
    default: Any = None
    allowed: Callable[[Any], bool] = lambda value: True
    words: str = ""
    needs_graphs: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)


FLAGS = {
    _FALLBACK_FLAG: Flag(
        "Action if layers cannot be captured (--cuda-graph-impl transformer_engine): error stops training and names "
        "the layer, the rank and the cause; eager logs a warning and continues without CUDA graphs.",
        default="error",
        allowed=lambda value: value in ("error", "eager"),
        words="error or eager",
        arguments={"choices": ("error", "eager")},
    ),
    LAYERS_FLAG: Flag(
        "Contents of one CUDA graph, with --use-megatron-fsdp and --cuda-graph-impl transformer_engine: "
        f"{WHOLE_MODEL} for all computation of a model from tokens to losses or logits, or 1 for a single layer. "
        f"Default: {WHOLE_MODEL} if possible, else 1.",
        allowed=lambda value: str(value) in (WHOLE_MODEL, "1"),
        words=f"{WHOLE_MODEL} or 1 (all was removed: use {WHOLE_MODEL})",
        arguments={"metavar": f"{WHOLE_MODEL}|1"},
    ),
    PACKED_FLAG: Flag(
        "Maximum number of packed sequences per micro-batch; attention graphs read their offsets (--cuda-graph-impl "
        "transformer_engine). Pad PackedSeqParams to N sequences with "
        "megatron.core.packed_seq_params.pad_packed_seq_params when you create batches.",
        allowed=lambda value: value > 0,
        words="a positive number of sequences",
        arguments={"type": int, "metavar": "N"},
    ),
    GROUPED_FLAG: Flag(
        "Compute all experts in one grouped matrix product, so that the host does not wait for token counts. With "
        "--cuda-graph-impl transformer_engine, graphs can then contain whole MoE layers. Needs --bf16 and compute "
        "capability 9.0 or newer.",
        default=False,
        needs_graphs=False,
        arguments={"action": "store_true"},
    ),
    FACTOR_FLAG: Flag(
        "Maximum number of tokens that a rank sends to each expert-parallel rank, as a multiple of an even share, with "
        f"{GROUPED_FLAG} and --moe-token-dispatcher-type alltoall. A step that exceeds it is repeated, eagerly and "
        "with room for all tokens, before the optimizer step, so that no token is dropped. With CUDA graphs, the limit "
        "applies from the capture on. Default: room for all tokens.",
        allowed=lambda value: value > 0,
        words="above 0, where 1 is an even share of the tokens",
        needs_graphs=False,
        arguments={"type": float, "metavar": "F"},
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this patch to ``parser``, and return it."""
    group = parser.add_argument_group(title="CUDA graphs")
    for name, flag in FLAGS.items():
        group.add_argument(name, help=flag.help, default=flag.default, **flag.arguments)
    return parser


def give_to_config(args: Any, config: Any) -> None:
    """Copy the flags of this patch from ``args`` to a ``TransformerConfig``."""
    for name in FLAGS:
        setattr(config, attribute(name), given(args, name))


def given(options: Any, name: str) -> Any:
    """Return the value of one of this patch's flags from parsed flags or a configuration."""
    return getattr(options, attribute(name), FLAGS[name].default)


def goes_on_eagerly(options: Any) -> bool:
    """Return whether training continues eagerly after a failed capture."""
    return bool(given(options, _FALLBACK_FLAG) == "eager")


def layers_per_graph(options: Any) -> LayersPerGraph | None:
    """Return the scope of one graph: ``model``, or 1 for a layer; None if unset."""
    value = given(options, LAYERS_FLAG)
    known: dict[str, LayersPerGraph] = {WHOLE_MODEL: WHOLE_MODEL, "1": 1}
    return known.get(str(value))


def packed_sequences(options: Any) -> int | None:
    """Return the maximum number of packed sequences per micro-batch; None if graphs do not support packing."""
    value: int | None = given(options, PACKED_FLAG)
    return value


def grouped_tensor(options: Any) -> bool:
    """Return whether one grouped matrix product computes all experts, with token counts on the GPU."""
    return bool(given(options, GROUPED_FLAG))


def alltoall_capacity_factor(options: Any) -> float | None:
    """Return the token capacity per expert-parallel rank as a multiple of an even share; None if unlimited."""
    value: float | None = given(options, FACTOR_FLAG)
    return value


def attribute(name: str) -> str:
    """Return the name of a flag as an attribute of parsed flags and configurations."""
    return name.removeprefix("--").replace("-", "_")


class Options:
    """Read access to training options by megatron-core's names.

    Args:
        sources: Validated flags, or ``TransformerConfig`` and ``DistributedDataParallelConfig``. The first source with
            a value takes precedence.
        sharding: Flag that shards the model; None to read it from ``sources``.
    """

    def __init__(self, *sources: Any, sharding: str | None = None):
        self._sources = sources
        self._sharding = sharding

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of an option, or ``default`` if it is None or missing."""
        for source in self._sources:
            value = getattr(source, name, None)
            if value is not None:
                return value
        return default

    def any(self, *names: str) -> bool:
        """Return whether any of the options is true or nonzero."""
        return any(self.get(name) for name in names)

    def several(self, name: str) -> bool:
        """Return whether an option is greater than 1."""
        return int(self.get(name, 1)) > 1

    def problems(self) -> Iterator[str]:
        """Yield an error message for each invalid flag of this patch, and for each parsed flag without effect."""
        parsed = self.get("use_megatron_fsdp") is not None and self._sharding is None
        for name, flag in FLAGS.items():
            value = self.get(attribute(name), flag.default)
            if value is not None and not flag.allowed(value):
                yield f"{name} must be {flag.words}, got {value}"
            # Eager runs may pad batches for comparison.
            allowed = ("transformer_engine", "none") if name == PACKED_FLAG else ("transformer_engine",)
            if parsed and flag.needs_graphs and value != flag.default and self.implementation not in allowed:
                yield (
                    f"{name} {value} needs --cuda-graph-impl transformer_engine, got {self.implementation}: "
                    f"leave out {name}"
                )
        if parsed and self.get(attribute(LAYERS_FLAG)) and self.sharding != MEGATRON_FSDP:
            yield f"{LAYERS_FLAG} needs --use-megatron-fsdp: leave out {LAYERS_FLAG}"

    @property
    def sharding(self) -> str | None:
        """Flag that shards the model; None if it is not sharded."""
        if self._sharding is None and self.get("use_megatron_fsdp"):
            return MEGATRON_FSDP
        return TORCH_FSDP if self._sharding is None and self.get("use_torch_fsdp2") else self._sharding

    @property
    def implementation(self) -> str:
        """Value of ``--cuda-graph-impl``: ``none``, ``transformer_engine``, ``local`` or ``full_iteration``."""
        return str(self.get("cuda_graph_impl", "none"))

    @property
    def modules(self) -> frozenset[str]:
        """Layer modules selected by ``--cuda-graph-modules``; empty for whole layers."""
        return frozenset(str(getattr(module, "name", module)) for module in self.get("cuda_graph_modules") or ())

    def graphs(self, *modules: str) -> bool:
        """Return whether any of these layer modules is captured."""
        return not self.modules or not self.modules.isdisjoint(modules)

    @property
    def double_buffer(self) -> bool:
        """Whether Megatron-FSDP uses a double buffer; several flags enable it."""
        return self.any("fsdp_double_buffer", "nccl_ub", "megatron_fsdp_max_pool_double_buffer")

    @property
    def has_experts(self) -> bool:
        """Whether the model has MoE layers."""
        return self.several("num_experts") or self.several("num_moe_experts")

    @property
    def pads_experts(self) -> bool:
        """Whether experts are padded to a fixed number of tokens."""
        return bool(self.get("moe_pad_expert_input_to_capacity")) and self.get("moe_expert_capacity_factor") is not None

    @property
    def grouped_tensor(self) -> bool:
        """Whether one grouped matrix product computes all experts, with token counts on the GPU."""
        return bool(self.get("moe_use_grouped_tensor"))

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return int(self.get("pipeline_model_parallel_size", 1))

    @property
    def hybrid_pattern(self) -> str:
        """Layer pattern of a hybrid model; empty for GPT models."""
        return str(self.get("hybrid_layer_pattern") or self.get("hybrid_override_pattern") or "")

    @property
    def quantizes_otherwise(self) -> bool:
        """Whether training uses FP4, or an FP8 recipe that is not tested in graphs of the whole model."""
        return bool(self.get("fp4") or self.fp8_recipe not in ("", "delayed", "tensorwise"))

    @property
    def fp8_recipe(self) -> str:
        """FP8 recipe; empty without FP8."""
        recipe = self.get("fp8_recipe") if self.get("fp8") else None
        return str(getattr(recipe, "value", recipe) or "")

    @property
    def updates_state(self) -> bool:
        """Whether passes update state that later passes need, so no pass may run eagerly between replays."""
        return self.any("fp8", "fp4", "delay_wgrad_compute")

    @property
    def recomputes_layers(self) -> bool:
        """Whether whole layers are recomputed; graphs of one layer do not support this."""
        return bool(self.get("recompute_granularity") == "full")

    def recomputes(self, *modules: str) -> bool:
        """Return whether any of these modules is recomputed selectively."""
        selected = self.get("recompute_modules", ["core_attn"])
        return self.get("recompute_granularity") == "selective" and not {*modules}.isdisjoint(selected)
