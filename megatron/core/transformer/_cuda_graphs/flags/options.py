"""What a user asked for, read alike from parsed flags and from configurations."""

from typing import Any

# Parsed flags and configurations name these differently.
_OTHER_NAMES = {
    "num_moe_experts": "num_experts",
    "use_megatron_fsdp": "use_custom_fsdp",
    "average_in_collective": "ddp_average_in_collective",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
}
# Values of --cuda-graph-modules that megatron-core still takes for other options.
_NO_MODULES = {"full", "full_iteration", "full_iteration_inference"}


class Options:
    """The options of a training by megatron-core's names for them.

    Flags may be as they were typed: megatron-core's validation, which replaces deprecated ones and adds what others
    imply, need not have run. An option that no source has counts as not given.

    Args:
        sources: Parsed flags, or ``TransformerConfig`` and ``DistributedDataParallelConfig``. The first that has a
            value counts.
    """

    def __init__(self, *sources: Any):
        self._sources = sources

    def get(self, name: str, default: Any = None) -> Any:
        """The option's value; ``default`` if it is None or in no source."""
        for source in self._sources:
            for known in (name, _OTHER_NAMES.get(name, name)):
                value = getattr(source, known, None)
                if value is not None:
                    return value
        return default

    def knows(self, name: str) -> bool:
        """Whether a source has the option, be its value None."""
        return any(hasattr(source, name) for source in self._sources)

    def any(self, *names: str) -> bool:
        """Whether one of these options is set, and not to zero."""
        return any(self.get(name) for name in names)

    def several(self, name: str) -> bool:
        """Whether the option is a number above 1."""
        return int(self.get(name, 1)) > 1

    @property
    def implementation(self) -> str:
        """``none``, ``transformer_engine``, ``local`` or ``full_iteration``, as in ``--cuda-graph-impl``."""
        if "full_iteration" in self._given_modules():
            return "full_iteration"
        if self.get("external_cuda_graph"):
            return "transformer_engine"
        return "local" if self.get("enable_cuda_graph") else str(self.get("cuda_graph_impl", "none"))

    @property
    def modules(self) -> frozenset[str]:
        """The parts of layers in ``--cuda-graph-modules``; empty for whole layers."""
        return self._given_modules() - _NO_MODULES

    def _given_modules(self) -> frozenset[str]:
        for name in ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated"):
            given = self.get(name) or ()
            given = given.split(",") if isinstance(given, str) else given
            given = given if isinstance(given, list | tuple | set | frozenset) else [given]
            if given:
                return frozenset(str(getattr(module, "name", module)) for module in given)
        return frozenset()

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
        return self.several("num_moe_experts")

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
        """Whether only the device knows how many tokens each expert gets."""
        return bool(self.get("moe_use_grouped_tensor"))

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return int(self.get("pipeline_model_parallel_size", 1))

    @property
    def interleaves(self) -> bool:
        """Whether a pipeline stage has several chunks of the model."""
        divides = self.any("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
        return (divides or self.several("virtual_pipeline_model_parallel_size")) and self.stages > 1

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
        """The recipe of FP8; empty without FP8, and where none is given."""
        recipe = self.get("fp8_recipe") if self.get("fp8") else None
        return str(getattr(recipe, "value", recipe) or "")

    @property
    def recomputes_layers(self) -> bool:
        """Whether whole layers are computed again, which graphs of single layers cannot do."""
        return bool(self.get("recompute_granularity") == "full")

    def recomputes(self, *modules: str) -> bool:
        """Whether one of these modules is selected for recomputation."""
        selective = self.get("recompute_activations") or self.get("recompute_granularity") == "selective"
        return bool(selective) and not {*modules}.isdisjoint(self.get("recompute_modules", ["core_attn"]))
