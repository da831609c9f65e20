"""Table of flags that are incompatible or untested with CUDA graphs or grouped experts, for checks and docs."""

import enum
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.utils import log_single_rank

from ..errors import OptionsError
from .options import FACTOR_FLAG, GROUPED_FLAG, MEGATRON_FSDP, TORCH_FSDP, WHOLE_MODEL, Options, attribute

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")
# torch reads both names; the second one is older.
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
Condition = Callable[[Options], object]


class Verdict(enum.Enum):
    """How a combination of flags is handled."""

    REFUSED = "refused"
    NO_EFFECT = "no effect"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Row:
    """A combination of flags and its verdict.

    Attributes:
        flags: Description of the flags and their condition; unique in the table.
        verdict: Whether the combination is rejected or logged as a warning.
        words: Message for the user: the flag, the reason, the remedy.
        when: Condition on the options.
        graphs: Values of ``--cuda-graph-impl`` that the row applies to; None for all.
        sharding: Flag that shards the models to which the row applies; None for all models.
    """

    flags: str
    verdict: Verdict
    words: str
    when: Condition
    graphs: tuple[str, ...] | None = ("transformer_engine",)
    sharding: str | None = MEGATRON_FSDP

    def applies(self, options: Options) -> bool:
        """Return whether the row applies to ``options``."""
        if self.sharding not in (None, options.sharding):
            return False
        if self.graphs is not None and options.implementation not in self.graphs:
            return False
        return bool(self.when(options))


MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")

_PACKED = "cuda_graph_packed_sequences"


def _refused(flags: str, when: Condition, words: str, **other: Any) -> Row:
    return Row(flags, Verdict.REFUSED, words, when, **other)


def _not_tried(flags: str, when: Condition, words: str = "", **other: Any) -> Row:
    return Row(flags, Verdict.NOT_TRIED, f"{flags}: not tested with CUDA graphs{words}", when, **other)


def _no_effect(flags: str, when: Condition, words: str) -> Row:
    return Row(flags, Verdict.NO_EFFECT, words, when)


def _experts(flag: str, flags: str, when: Condition, words: str) -> Row:
    """Return a row that rejects ``flag``, an MoE flag of this patch, if ``when`` holds, even without graphs.

    ``flag`` is prepended to ``flags`` and ``words``.
    """
    return _refused(
        f"{flag} {flags}", lambda o: o.get(attribute(flag)) and when(o), f"{flag} {words}", graphs=None, sharding=None
    )


_grouped = partial(_experts, GROUPED_FLAG)
_bounded = partial(_experts, FACTOR_FLAG)


def _needs_token_counts(options: Options) -> bool:
    """Return whether captured experts would need token counts on the host."""
    on_device = options.pads_experts or (options.grouped_tensor and not options.modules)
    return options.has_experts and options.graphs("moe") and not on_device


def _packs(options: Options) -> bool:
    return options.any("sft", "dataloader_inter_document_masking")


def _packed_in_graphs(options: Options) -> bool:
    return bool(options.get(_PACKED)) and options.graphs("attn")


def _overlaps(options: Options) -> bool:
    return bool(options.get("overlap_moe_expert_parallel_comm"))


def _routes_by_sinkhorn(options: Options) -> bool:
    kinds = options.get("moe_router_load_balancing_type", "aux_loss")
    return options.has_experts and "sinkhorn" in ([kinds] if isinstance(kinds, str) else kinds)


def _tensor_parallel_experts(options: Options) -> bool:
    size = options.get("expert_tensor_parallel_size")
    return options.several("tensor_model_parallel_size") if size is None else int(size) > 1


def _shards_all(options: Options) -> bool:
    """Return whether the sharding strategy is ``optim_grads_params``, which also shards parameters."""
    return bool(options.get("data_parallel_sharding_strategy", "no_shard") == "optim_grads_params")


def _captures_single_layers(options: Options) -> bool:
    """Return whether flags rule out a graph of the whole model."""
    sharded = options.sharding == MEGATRON_FSDP and _shards_all(options)
    return bool(not sharded or options.modules or str(options.get("cuda_graph_layers_per_graph")) == "1")


def _recomputes_random_numbers(options: Options) -> bool:
    """Return whether recomputed modules draw random numbers."""
    routing = options.any("moe_input_jitter_eps", "moe_router_force_load_balancing")
    routing |= options.get("moe_router_force_biased") is not None  # 0 also draws
    dropout = options.any("attention_dropout")
    if options.recomputes_layers:
        return routing or dropout or options.any("hidden_dropout")
    return (routing and options.recomputes("moe")) or (dropout and options.recomputes("core_attn"))


def _keeps_layers_in_graphs(options: Options) -> bool:
    """Return whether layers have their own graphs and cannot run eagerly between replays."""
    separate = _captures_single_layers(options) or options.quantizes_otherwise
    return bool(separate and (options.stages > 1 or options.updates_state))


_REFUSED = [
    _refused(
        "--fsdp-double-buffer not given",
        lambda o: not o.double_buffer,
        "--fsdp-double-buffer is required: without it, each all-gather writes to a new address, but graphs read the "
        "captured one",
    ),
    _refused(
        "--fsdp-db-use-persist-buf-on-alloc-fail not given",
        lambda o: not o.get("fsdp_db_use_persist_buf_on_alloc_fail"),
        "--fsdp-db-use-persist-buf-on-alloc-fail is required: without it, a bucket that does not fit the double buffer "
        "gets a new address in each step, but graphs access the captured one",
    ),
    _refused(
        "--megatron-fsdp-version 2",
        lambda o: str(o.get("megatron_fsdp_version", 1)) != "1",
        "--megatron-fsdp-version must be 1 with CUDA graphs: set it to 1, or set --cuda-graph-impl none",
    ),
    _refused(
        "--cuda-graph-impl local",
        lambda o: True,
        "--cuda-graph-impl local does not run FSDP hooks around its graphs: set --cuda-graph-impl transformer_engine",
        graphs=("local",),
    ),
    _refused(
        "--data-parallel-sharding-strategy optim_grads, optim or no_shard without --no-gradient-accumulation-fusion",
        lambda o: o.get("gradient_accumulation_fusion") and not _shards_all(o),
        "--no-gradient-accumulation-fusion is required unless --data-parallel-sharding-strategy is optim_grads_params: "
        "other strategies move the main gradients",
    ),
    _refused(
        "--num-experts with whole MoE layers in graphs and token counts on the host",
        _needs_token_counts,
        "--num-experts: whole MoE layers cannot be captured, because the host reads the token counts of experts: add "
        "--moe-use-grouped-tensor and leave out --cuda-graph-modules, or set --cuda-graph-modules attn moe_router "
        "moe_preprocess, or add --moe-pad-expert-input-to-capacity and --moe-expert-capacity-factor",
    ),
    _refused(
        "--moe-router-load-balancing-type sinkhorn with the router in graphs",
        lambda o: _routes_by_sinkhorn(o) and o.graphs("moe", "moe_router"),
        "--moe-router-load-balancing-type sinkhorn checks convergence on the host, which a graph cannot do: "
        "leave moe, moe_router and moe_preprocess out of --cuda-graph-modules, or set another "
        "--moe-router-load-balancing-type",
    ),
    _refused(
        "--moe-routing-trace-path, --moe-enable-routing-replay with the router in graphs",
        lambda o: (
            o.any("moe_routing_trace_path", "moe_enable_routing_replay")
            and o.has_experts
            and o.graphs("moe", "moe_router")
        ),
        "--moe-routing-trace-path and --moe-enable-routing-replay need Python code, which replays do not run: leave "
        "moe, moe_router and moe_preprocess out of --cuda-graph-modules",
        sharding=None,
    ),
    _refused(
        "--mlp-chunks-for-training with --cuda-graph-modules moe_router",
        lambda o: o.several("mlp_chunks_for_training") and o.has_experts and "moe_router" in o.modules,
        "--mlp-chunks-for-training routes each chunk separately, but a graph of moe_router ends after the first "
        "chunk's router: leave moe_router out of --cuda-graph-modules, or leave out --mlp-chunks-for-training",
        sharding=None,
    ),
    _refused(
        "--recompute-granularity full with graphs per layer",
        lambda o: o.recomputes_layers and _captures_single_layers(o),
        "--recompute-granularity full needs a graph of the whole model: set --use-megatron-fsdp and "
        "--data-parallel-sharding-strategy optim_grads_params, and leave out --cuda-graph-modules and "
        "--cuda-graph-layers-per-graph 1",
        sharding=None,
    ),
    _refused(
        "--recompute-granularity, --recompute-modules with dropout or random routing in recomputed modules",
        _recomputes_random_numbers,
        "--recompute-granularity and --recompute-modules repeat dropout and random routing with different numbers, "
        "because megatron-core does not restore the generators that graphs use: recompute other modules, or set "
        "--hidden-dropout 0 and --attention-dropout 0 and leave out --moe-input-jitter-eps, "
        "--moe-router-force-load-balancing and --moe-router-force-biased",
        sharding=None,
    ),
    _refused(
        "--overlap-moe-expert-parallel-comm",
        _overlaps,
        "--overlap-moe-expert-parallel-comm does not work with graphs under Megatron-FSDP: leave it out, or set "
        "--cuda-graph-impl none",
    ),
    _refused(
        "--overlap-moe-expert-parallel-comm with DistributedDataParallel and whole layers",
        lambda o: _overlaps(o) and not o.modules and o.sharding != MEGATRON_FSDP,
        "--overlap-moe-expert-parallel-comm splits layers, and graphs can contain only the part before the token "
        "dispatch: set --cuda-graph-modules attn moe_router moe_preprocess",
        sharding=None,
    ),
    _refused(
        "--sft, --dataloader-inter-document-masking with attention in graphs, without --cuda-graph-packed-sequences",
        lambda o: _packs(o) and o.graphs("attn") and not o.get(_PACKED),
        "--sft and --dataloader-inter-document-masking pack sequences, and graphs of attention need a maximum number "
        "of sequences: set --cuda-graph-packed-sequences to the maximum per micro-batch, leave attn out of "
        "--cuda-graph-modules, or set --cuda-graph-impl none",
    ),
    _refused(
        "--sft, --dataloader-inter-document-masking with --micro-batch-size above 1 and MoE layers in graphs",
        lambda o: _packs(o) and o.has_experts and o.several("micro_batch_size") and o.graphs("moe", "moe_router"),
        "--sft and --dataloader-inter-document-masking pack a micro-batch into one row, but graphs of MoE layers are "
        "captured for --micro-batch-size rows: set --micro-batch-size 1, or leave moe and moe_router out of "
        "--cuda-graph-modules",
    ),
    _refused(
        "--cuda-graph-packed-sequences with --micro-batch-size above 1",
        lambda o: _packed_in_graphs(o) and o.several("micro_batch_size"),
        "--cuda-graph-packed-sequences needs all sequences in one row: set --micro-batch-size 1 and a longer "
        "--seq-length",
    ),
    _refused(
        "--cuda-graph-packed-sequences with unfused rotary embeddings (--no-rope-fusion, yarn, mrope)",
        lambda o: (
            _packed_in_graphs(o)
            and o.get("position_embedding_type") in ("rope", "yarn", "mrope")
            and (o.get("position_embedding_type") != "rope" or not o.get("apply_rope_fusion"))
        ),
        "--cuda-graph-packed-sequences needs fused rotary embeddings, because unfused ones read sequence lengths on "
        "the host: leave out --no-rope-fusion, or set --position-embedding-type to none or learned_absolute",
    ),
    _refused(
        "--cuda-graph-packed-sequences with Mamba layers in graphs",
        lambda o: _packed_in_graphs(o) and "M" in o.hybrid_pattern and o.graphs("mamba"),
        "--cuda-graph-packed-sequences does not support graphs of Mamba layers: set --cuda-graph-modules without mamba",
    ),
    _refused(
        "--qk-clip, --log-max-attention-logit, --experimental-attention-variant dsa with attention in graphs",
        lambda o: (
            (o.any("qk_clip", "log_max_attention_logit") or o.get("experimental_attention_variant") == "dsa")
            and o.graphs("attn")
        ),
        "--qk-clip, --log-max-attention-logit and --experimental-attention-variant dsa read values that Python code "
        "stores in each pass, but replays do not run it: leave them out, or set --cuda-graph-modules without attn",
        sharding=None,
    ),
    _refused(
        "--save-activations-interval, --save-dgrads-interval, --save-tokens-per-expert-interval with graphs per layer",
        lambda o: (
            _keeps_layers_in_graphs(o)
            and (
                o.any("save_activations_interval", "save_dgrads_interval")
                or (o.get("save_tokens_per_expert_interval") and o.graphs("moe"))
            )
        ),
        "--save-activations-interval, --save-dgrads-interval and --save-tokens-per-expert-interval add hooks in some "
        "steps, but layers with their own graphs cannot run eagerly with pipeline stages, FP8, FP4 or "
        "--delay-wgrad-compute: leave them out",
        sharding=None,
    ),
    _refused(
        "--fine-grained-activation-offloading",
        lambda o: o.get("fine_grained_activation_offloading"),
        "--fine-grained-activation-offloading does not work with --cuda-graph-impl transformer_engine: leave it out, "
        "recompute activations (--recompute-granularity), or set --cuda-graph-impl none",
        sharding=None,
    ),
    _refused(
        "--te-precision-config-file, --kitchen-config-file, --kitchen-recipe-number",
        lambda o: (
            o.any("quant_recipe", "use_kitchen", "te_precision_config_file", "kitchen_config_file")
            or o.get("kitchen_recipe_number") is not None
        ),
        "--te-precision-config-file, --kitchen-config-file and --kitchen-recipe-number quantize single modules, whose "
        "weights replays would not quantize again: set --fp8-format instead, or set --cuda-graph-impl none",
        sharding=None,
    ),
    _refused(
        "--optimizer-cuda-graph with --use-megatron-fsdp or --use-torch-fsdp2",
        lambda o: o.get("optimizer_cuda_graph") and o.sharding,
        "--optimizer-cuda-graph is not supported with --use-megatron-fsdp or --use-torch-fsdp2: leave it out",
        graphs=None,
        sharding=None,
    ),
    _refused(
        "--use-torch-fsdp2 with --cuda-graph-impl transformer_engine or full_iteration",
        lambda o: True,
        "--use-torch-fsdp2 does not keep parameters at fixed addresses, which graphs need: use --use-megatron-fsdp, "
        "which supports a graph of the whole model, or set --cuda-graph-impl none",
        graphs=("transformer_engine", "full_iteration"),
        sharding=TORCH_FSDP,
    ),
    _refused(
        "--cuda-graph-warmup-steps below 0",
        lambda o: int(o.get("cuda_graph_warmup_steps", 3)) < 0,
        "--cuda-graph-warmup-steps must be 0 or more",
    ),
]

# Rows that apply with and without graphs
EXPERT_ROWS = [
    _grouped("without --num-experts", lambda o: not o.has_experts, "needs --num-experts above 1"),
    _grouped(
        "with --moe-expert-capacity-factor",
        lambda o: o.get("moe_expert_capacity_factor") is not None,
        "does not drop or pad tokens: leave out --moe-expert-capacity-factor and --moe-pad-expert-input-to-capacity",
    ),
    _grouped(
        "with --fp8-format, --fp4-format or --fp16",
        lambda o: o.any("fp8", "fp4", "fp16"),
        "multiplies in bf16, because no FP8 recipe has the row scales that torch's grouped FP8 products need: leave "
        "out --fp8-format, --fp4-format and --fp16",
    ),
    _grouped(
        "with sizes not divisible by 8",
        lambda o: any((o.get(size) or 0) % 8 for size in ("hidden_size", "moe_ffn_hidden_size", "moe_latent_size")),
        "needs rows aligned to 16 bytes: set --hidden-size, --moe-ffn-hidden-size and --moe-latent-size to multiples "
        "of 8",
    ),
    _grouped(
        "with --moe-token-dispatcher-type flex",
        lambda o: o.get("moe_token_dispatcher_type") == "flex",
        "needs --moe-token-dispatcher-type alltoall or allgather: the kernels of flex read token counts on the host",
    ),
    _grouped(
        "with --expert-tensor-parallel-size above 1",
        _tensor_parallel_experts,
        "does not support tensor-parallel experts: set --expert-tensor-parallel-size 1",
    ),
    _grouped(
        "with --delay-wgrad-compute or --overlap-dispatch-backward-with-experts-wgrad",
        lambda o: o.any("delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad"),
        "computes weight gradients within the backward pass of each layer: leave out --delay-wgrad-compute and "
        "--overlap-dispatch-backward-with-experts-wgrad",
    ),
    _grouped(
        "with --recompute-modules moe_act or --offload-modules of experts",
        lambda o: (
            o.recomputes("moe_act")
            or (
                o.get("fine_grained_activation_offloading")
                and not {"expert_fc1", "moe_act", "fused_group_mlp"}.isdisjoint(o.get("offload_modules", ()))
            )
        ),
        "does not recompute or offload expert activations: leave moe_act out of --recompute-modules, and expert_fc1, "
        "moe_act and fused_group_mlp out of --offload-modules",
    ),
    _grouped(
        "with flags that add hooks to experts",
        lambda o: o.any("save_activations_interval", "save_dgrads_interval", "save_tokens_per_expert_interval"),
        "does not run the hooks of --save-activations-interval, --save-dgrads-interval and "
        "--save-tokens-per-expert-interval: leave these flags out",
    ),
    _grouped(
        "with another implementation of experts",
        lambda o: (
            o.any(
                *("use_transformer_engine_op_fuser", "moe_mlp_glu_interleave_size"),
                *("moe_single_grouped_weight", "moe_single_grouped_bias"),
            )
            or o.get("transformer_impl") == "inference_optimized"
        ),
        "replaces other implementations of experts: leave out --use-transformer-engine-op-fuser, "
        "--moe-mlp-glu-interleave-size, --moe-single-grouped-weight, --moe-single-grouped-bias and --transformer-impl "
        "inference_optimized",
    ),
    _grouped(
        "with --use-torch-fsdp2 or --tensor-parallel-num-weight-shards",
        lambda o: o.sharding == TORCH_FSDP or o.several("gtp_weight_remat_size"),
        "is not tested with --use-torch-fsdp2 or --tensor-parallel-num-weight-shards: leave it out",
    ),
    _grouped(
        "with --cuda-graph-impl local",
        lambda o: o.implementation == "local",
        "does not work with megatron-core's local graphs: set --cuda-graph-impl transformer_engine",
    ),
    _bounded(
        "without --moe-use-grouped-tensor, alltoall or expert parallelism",
        lambda o: (
            not o.grouped_tensor
            or o.get("moe_token_dispatcher_type", "allgather") != "alltoall"
            or not o.several("expert_model_parallel_size")
        ),
        f"needs {GROUPED_FLAG}, --moe-token-dispatcher-type alltoall and --expert-model-parallel-size above 1",
    ),
    _bounded(
        "with another --rerun-mode or --cuda-graph-impl",
        lambda o: (
            o.get("rerun_mode", "validate_results") != "validate_results"
            or o.implementation not in ("none", "transformer_engine")
        ),
        "repeats steps eagerly when a rank receives too many tokens: set --rerun-mode validate_results, and "
        "--cuda-graph-impl none or transformer_engine",
    ),
    _bounded(
        "with --pipeline-model-parallel-size above 1",
        lambda o: o.stages > 1,
        "is not tested with --pipeline-model-parallel-size above 1: leave it out",
    ),
    _bounded(
        "without --disable-bias-linear",
        lambda o: o.get("add_bias_linear", True),
        "needs --disable-bias-linear: graphs have more padded rows than eager passes, which changes bias gradients",
    ),
    _bounded(
        "with --qk-clip or --log-max-attention-logit",
        lambda o: o.any("qk_clip", "log_max_attention_logit"),
        "repeats steps, but --qk-clip and --log-max-attention-logit would also record the discarded passes: do "
        "not combine them",
    ),
]

_NO_EFFECT = [
    _no_effect(
        "--cuda-graph-layers-per-graph with --cuda-graph-modules, or model without optim_grads_params",
        lambda o: (
            (o.modules and str(o.get("cuda_graph_layers_per_graph", 1)) != "1")
            or (o.get("cuda_graph_layers_per_graph") == WHOLE_MODEL and not _shards_all(o))
        ),
        "--cuda-graph-layers-per-graph has no effect with --cuda-graph-modules, or without "
        "--data-parallel-sharding-strategy optim_grads_params: each layer gets its own graphs; leave it out",
    ),
]

_NOT_TRIED = [
    _not_tried("--optimizer-cpu-offload", lambda o: o.get("optimizer_cpu_offload")),
    _not_tried(
        "--fp4-format, --fp8-recipe mxfp8 or custom",
        lambda o: o.get("fp4") or o.fp8_recipe in ("mxfp8", "custom"),
    ),
    _not_tried(
        "--async-save",
        lambda o: o.get("async_save"),
        "; the default --async-strategy nvrx needs nvidia-resiliency-ext newer than 0.4.1",
    ),
]

TABLE = (*_REFUSED, *EXPERT_ROWS, *_NO_EFFECT, *_NOT_TRIED)


def rows_of(options: Options, table: Iterable[Row] = TABLE) -> list[Row]:
    """Return the rows of ``table`` that apply to ``options``."""
    return [row for row in table if row.applies(options)]


def check(options: Options, table: Iterable[Row] = TABLE) -> None:
    """Reject options that are incompatible according to ``table``.

    Raises:
        OptionsError: Options are invalid or incompatible; lists all problems with their remedies.
    """
    refused = (row.words for row in rows_of(options, table) if row.verdict is Verdict.REFUSED)
    problems = [*options.problems(), *refused]
    if problems:
        kind = f"{options.sharding} with " if options.sharding else ""
        raise OptionsError("\n- ".join([f"{kind}--cuda-graph-impl {options.implementation}:", *problems]))


def warn(options: Options) -> None:
    """Log a warning for each flag that has no effect or is not tested."""
    for row in rows_of(options):
        if row.verdict is not Verdict.REFUSED:
            log_single_rank(logger, logging.WARNING, row.words)


def allocator_problem() -> str | None:
    """Return an error message for allocator settings that break graphs with NCCL; None if the settings are valid.

    Expandable segments are remapped as they grow, but NCCL registers graph memory by address.
    """
    if os.environ.get("NCCL_GRAPH_REGISTER") == "0":
        return None
    for variable in _ALLOCATOR_SETTINGS:
        if "expandable_segments:True" in "".join(os.environ.get(variable, "").split()):
            return (
                f"{variable}=expandable_segments:True needs NCCL_GRAPH_REGISTER=0 with CUDA graphs: set it. Otherwise "
                "NCCL registers memory that moves."
            )
    return None
