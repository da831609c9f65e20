"""The flags that do not work with CUDA graphs or grouped experts, or were not tried: one table for checks and docs."""

import enum
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.utils import log_single_rank

from ..errors import OptionsError
from ..hooks import must_run_outside
from .options import FACTOR_FLAG, GROUPED_FLAG, MEGATRON_FSDP, TORCH_FSDP, WHOLE_MODEL, Options

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")
# torch reads both spellings; the second is the older one.
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
Condition = Callable[[Options], object]


class Verdict(enum.Enum):
    """What is known of flags together with CUDA graphs."""

    REFUSED = "refused"
    NO_EFFECT = "no effect"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Row:
    """A combination of flags, and what happens to it.

    Attributes:
        flags: The combination in one line, which no other row has.
        words: The line that a user gets: the flag at fault, why, and what to do.
        when: Whether options have the combination.
        graphs: The values of ``--cuda-graph-impl`` that the row is about; None for all.
        sharding: The flag that shards the model; None for any model.
    """

    flags: str
    verdict: Verdict
    words: str
    when: Condition
    graphs: tuple[str, ...] | None = ("transformer_engine",)
    sharding: str | None = MEGATRON_FSDP

    def applies(self, options: Options) -> bool:
        """Whether ``options`` have the combination."""
        if self.sharding not in (None, options.sharding):
            return False
        if self.graphs is not None and options.implementation not in self.graphs:
            return False
        return bool(self.when(options))


MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")

_PARTS_OF_OVERLAP = (
    "--overlap-moe-expert-parallel-comm runs layers in parts, and graphs can hold those before the tokens are "
    "dispatched: set --cuda-graph-modules attn moe_router moe_preprocess"
)
_PACKED = "cuda_graph_packed_sequences"


def _refused(flags: str, when: Condition, words: str, **other: Any) -> Row:
    return Row(flags, Verdict.REFUSED, words, when, **other)


def _not_tried(flags: str, when: Condition, words: str = "", **other: Any) -> Row:
    return Row(flags, Verdict.NOT_TRIED, f"{flags}: not tried with graphs{words}", when, **other)


def _no_effect(flags: str, when: Condition, words: str) -> Row:
    return Row(flags, Verdict.NO_EFFECT, words, when)


def _grouped(flags: str, when: Condition, words: str) -> Row:
    """Return a row of grouped experts, with or without graphs."""
    both = f"{GROUPED_FLAG}, {flags}"
    return _refused(both, lambda o: o.grouped_tensor and when(o), f"{GROUPED_FLAG} {words}", graphs=None, sharding=None)


def _bounded(flags: str, when: Condition, words: str) -> Row:
    """Return a row of bounded all-to-alls, with or without graphs."""
    return _refused(
        f"{FACTOR_FLAG}, {flags}",
        lambda o: o.get("moe_alltoall_capacity_factor") is not None and when(o),
        f"{FACTOR_FLAG} {words}",
        graphs=None,
        sharding=None,
    )


def _warmup(options: Options) -> int:
    return int(options.get("cuda_graph_warmup_steps", 3))


def _preprocess_waits(options: Options) -> bool:
    """Whether the host waits for the router's result before the dispatch."""
    sizes_vary = options.get("moe_expert_capacity_factor") is not None or options.get("moe_router_padding_for_fp8")
    dispatcher = options.get("moe_token_dispatcher_type", "allgather")
    in_graph = "moe_preprocess" in options.modules and options.has_experts
    return in_graph and dispatcher == "alltoall" and bool(sizes_vary) and not options.pads_experts


def _asks_for_tokens(options: Options) -> bool:
    """Whether a graph would hold what waits for the number of tokens that each expert gets."""
    on_device = options.pads_experts or (options.grouped_tensor and not options.modules)
    return options.has_experts and options.graphs("moe") and not on_device


def _captures_each_layer(options: Options) -> bool:
    """Whether graphs surely hold single layers, or parts of them."""
    most = str(options.get("cuda_graph_layers_per_graph"))
    asked = options.modules or most == "1" or (most == "all" and options.stages > 1)
    return bool(asked) or not _shards_all(options)


def _random_recompute(options: Options) -> bool:
    attention = options.get("attention_dropout", 0.0) and options.recomputes("core_attn") and options.graphs("attn")
    mlp = options.recomputes("mlp") and options.graphs("mlp")
    moe = options.recomputes("moe") and options.graphs("moe")
    return bool(attention or (options.get("hidden_dropout", 0.0) and (mlp or moe)))


def _not_hybrid(options: Options) -> bool:
    """Whether the model surely has no Mamba layers; configurations alone do not say."""
    return options.knows("hybrid_layer_pattern") and not options.hybrid_pattern and not options.get("spec")


def _packs(options: Options) -> bool:
    return options.any("sft", "dataloader_inter_document_masking")


def _packed_in_graphs(options: Options) -> bool:
    return bool(options.get(_PACKED)) and options.graphs("attn")


def _overlaps(options: Options) -> bool:
    """Whether the experts' tokens of one micro-batch travel while another one is computed."""
    return bool(options.get("overlap_moe_expert_parallel_comm"))


def _routes_by_sinkhorn(options: Options) -> bool:
    kinds = options.get("moe_router_load_balancing_type", "aux_loss")
    return options.has_experts and "sinkhorn" in ([kinds] if isinstance(kinds, str) else kinds)


def _tensor_parallel_experts(options: Options) -> bool:
    size = options.get("expert_tensor_parallel_size")
    return options.several("tensor_model_parallel_size") if size is None else int(size) > 1


def _shards_all(options: Options) -> bool:
    """Whether parameters are sharded too."""
    return bool(options.get("data_parallel_sharding_strategy", "no_shard") == "optim_grads_params")


_REFUSED = [
    _refused(
        "--fsdp-double-buffer missing",
        lambda options: not options.double_buffer and not _overlaps(options),
        "--fsdp-double-buffer is required: without it parameters are gathered to another address in every iteration, "
        "and a graph reads the old one",
        graphs=("transformer_engine", "local"),
    ),
    _refused(
        "--fsdp-db-use-persist-buf-on-alloc-fail missing",
        lambda options: not options.get("fsdp_db_use_persist_buf_on_alloc_fail") and not _overlaps(options),
        "--fsdp-db-use-persist-buf-on-alloc-fail is required: without it a bucket that does not fit the double buffer "
        "is allocated anew in every iteration, and replaying a graph then is an illegal memory access",
        graphs=("transformer_engine", "local"),
    ),
    _refused(
        "--megatron-fsdp-version 2, which megatron-core has from 0.20 on",
        lambda options: str(options.get("megatron_fsdp_version", 1)) != "1",
        "--megatron-fsdp-version: graphs are made for Megatron-FSDP's first version; set 1, or --cuda-graph-impl none",
    ),
    _refused(
        "--cuda-graph-impl local",
        lambda options: True,
        "--cuda-graph-impl local runs no FSDP hooks around its graphs: use --cuda-graph-impl transformer_engine",
        graphs=("local",),
    ),
    _refused(
        "--data-parallel-sharding-strategy other than optim_grads_params, fused gradient accumulation",
        lambda options: options.get("gradient_accumulation_fusion") and not _shards_all(options),
        "--no-gradient-accumulation-fusion is required unless --data-parallel-sharding-strategy is "
        "optim_grads_params: only then do the main gradients that a graph would write stay in place",
        graphs=("transformer_engine", "local"),
    ),
    _refused(
        "--cuda-graph-modules moe moe_router",
        lambda options: {"moe", "moe_router"} <= options.modules,
        "--cuda-graph-modules has both moe and moe_router: moe is a whole MoE layer, its router too; leave one out",
    ),
    _refused(
        "--cuda-graph-modules moe_preprocess without moe_router",
        lambda options: "moe_preprocess" in options.modules and "moe_router" not in options.modules,
        "--cuda-graph-modules has moe_preprocess, which continues the router's graph: add moe_router",
    ),
    _refused(
        "--cuda-graph-modules moe, moe_router or moe_preprocess, dense model",
        lambda options: (
            not options.has_experts and not options.modules.isdisjoint(("moe", "moe_router", "moe_preprocess"))
        ),
        "--cuda-graph-modules names a part of MoE layers, and the model has none: leave moe, moe_router and "
        "moe_preprocess out, or set --num-experts",
    ),
    _refused(
        "--cuda-graph-modules mlp, every layer with experts",
        lambda options: "mlp" in options.modules and not options.has_dense_layers,
        "--cuda-graph-modules has mlp, the MLP of dense layers, and --moe-layer-freq gives every layer experts: leave "
        "mlp out, and see moe and moe_router",
    ),
    _refused(
        "--cuda-graph-modules mamba, --hybrid-layer-pattern missing",
        lambda options: "mamba" in options.modules and _not_hybrid(options),
        "--cuda-graph-modules has mamba, and the model has no Mamba layers: leave mamba out, or set "
        "--hybrid-layer-pattern",
    ),
    _refused(
        "--num-experts, whole layers, without --moe-use-grouped-tensor, or --cuda-graph-modules moe; not padded",
        _asks_for_tokens,
        "--num-experts with whole layers or moe in graphs: how many tokens an expert gets differs from step to step, "
        "and the host waits for the number; add --moe-use-grouped-tensor and leave out --cuda-graph-modules, or set "
        "--cuda-graph-modules attn moe_router moe_preprocess, or give every expert as many with "
        "--moe-pad-expert-input-to-capacity and --moe-expert-capacity-factor",
    ),
    _refused(
        "--moe-router-load-balancing-type sinkhorn, router in graphs",
        lambda options: _routes_by_sinkhorn(options) and options.graphs("moe", "moe_router"),
        "--moe-router-load-balancing-type sinkhorn repeats until the host has seen a small error, which no graph can: "
        "set --cuda-graph-modules to parts other than moe, moe_router and moe_preprocess, or another "
        "--moe-router-load-balancing-type",
    ),
    _refused(
        "--mlp-chunks-for-training above 1, --cuda-graph-modules moe_router",
        lambda options: (
            options.several("mlp_chunks_for_training") and options.has_experts and "moe_router" in options.modules
        ),
        "--mlp-chunks-for-training routes each chunk by itself, and a graph of moe_router ends at the first one's "
        "router: leave moe_router out of --cuda-graph-modules, or --mlp-chunks-for-training",
    ),
    _refused(
        "--cuda-graph-modules moe_preprocess, --moe-expert-capacity-factor or --moe-router-padding-for-fp8, not padded",
        _preprocess_waits,
        "--cuda-graph-modules has moe_preprocess, in which the host waits for the GPU because of "
        "--moe-expert-capacity-factor or --moe-router-padding-for-fp8: leave moe_preprocess or these out, or add "
        "--moe-pad-expert-input-to-capacity",
    ),
    _refused(
        "--recompute-granularity full, where only graphs of single layers or their parts are possible",
        lambda options: options.recomputes_layers and _captures_each_layer(options),
        "--recompute-granularity full computes layers again outside of graphs of single layers: use "
        "--recompute-granularity selective, or leave out what rules out graphs of all layers (--cuda-graph-modules, "
        "--cuda-graph-layers-per-graph 1, or all in a pipeline, --data-parallel-sharding-strategy other than "
        "optim_grads_params)",
    ),
    _refused(
        "--recompute-modules moe with --cuda-graph-modules moe_router",
        lambda options: options.recomputes("moe") and "moe_router" in options.modules,
        "--recompute-modules has moe, and --cuda-graph-modules moe_router, a part of it: leave one out",
    ),
    _refused(
        "--recompute-modules core_attn, mlp or moe in a graph, with dropout",
        _random_recompute,
        "--recompute-modules names a part of layers that is in graphs and draws random numbers: set "
        "--attention-dropout 0 (core_attn) or --hidden-dropout 0 (mlp, moe), or leave it out of --recompute-modules",
    ),
    _refused(
        "--recompute-granularity full, with dropout or --moe-input-jitter-eps",
        lambda options: (
            options.recomputes_layers and options.any("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
        ),
        "--recompute-granularity full with dropout or --moe-input-jitter-eps: of generators that graphs can draw from "
        "megatron-core keeps no states, so a layer that is computed again draws other numbers, also without graphs; "
        "set --hidden-dropout 0 and --attention-dropout 0, and leave --moe-input-jitter-eps out",
    ),
    _refused(
        "--overlap-moe-expert-parallel-comm, --fsdp-double-buffer",
        lambda options: _overlaps(options) and options.double_buffer,
        "--overlap-moe-expert-parallel-comm computes two micro-batches at a time, in more layers than a double buffer "
        "has room for: leave out --fsdp-double-buffer, and --use-nccl-ub and --megatron-fsdp-max-pool-double-buffer, "
        "which imply it; the weights that graphs read stay in place without it",
    ),
    _refused(
        "--overlap-moe-expert-parallel-comm, whole layers",
        lambda options: _overlaps(options) and not options.modules,
        _PARTS_OF_OVERLAP,
        sharding=None,
    ),
    _refused(
        "--overlap-moe-expert-parallel-comm, --cuda-graph-modules mlp or moe",
        lambda options: _overlaps(options) and not options.modules.isdisjoint(("mlp", "moe")),
        _PARTS_OF_OVERLAP,
    ),
    _refused(
        "--overlap-moe-expert-parallel-comm, fused gradient accumulation",
        lambda options: _overlaps(options) and options.get("gradient_accumulation_fusion"),
        "--no-gradient-accumulation-fusion is required with --overlap-moe-expert-parallel-comm: without a double "
        "buffer the main gradients that a graph would write are elsewhere in every iteration",
    ),
    _refused(
        "--delay-wgrad-compute",
        lambda options: options.get("delay_wgrad_compute"),
        "--delay-wgrad-compute does not work with graphs under Megatron-FSDP: with --overlap-moe-expert-parallel-comm, "
        "which it needs, main gradients that graphs would add to do not stay in place; leave it out",
    ),
    _refused(
        "--overlap-moe-expert-parallel-comm, --cuda-graph-packed-sequences",
        lambda options: _overlaps(options) and _packed_in_graphs(options),
        "--overlap-moe-expert-parallel-comm replays layers without calling them, and --cuda-graph-packed-sequences "
        "gives graphs the lengths in that call: leave one out, or set --cuda-graph-modules to parts other than attn",
    ),
    _refused(
        "--sft or --dataloader-inter-document-masking, attention in graphs, --cuda-graph-packed-sequences missing",
        lambda options: _packs(options) and options.graphs("attn") and not options.get(_PACKED),
        "--sft and --dataloader-inter-document-masking pack sequences, and graphs of attention read the lengths of a "
        "fixed number of them: set --cuda-graph-packed-sequences to as many as a micro-batch may have, "
        "--cuda-graph-modules to parts other than attn, or --cuda-graph-impl none",
    ),
    _refused(
        "--sft or --dataloader-inter-document-masking, --micro-batch-size above 1, MoE layers in graphs",
        lambda options: (
            _packs(options)
            and options.has_experts
            and options.several("micro_batch_size")
            and options.graphs("moe", "moe_router")
        ),
        "--sft and --dataloader-inter-document-masking put the sequences of a micro-batch into one row, and MoE layers "
        "in graphs do not know how many they are: set --micro-batch-size 1, or --cuda-graph-modules without moe and "
        "moe_router",
    ),
    _refused(
        "--cuda-graph-packed-sequences, --micro-batch-size above 1",
        lambda options: _packed_in_graphs(options) and options.several("micro_batch_size"),
        "--cuda-graph-packed-sequences needs sequences in one row: set --micro-batch-size 1, and a longer --seq-length",
    ),
    _refused(
        "--cuda-graph-packed-sequences, --no-rope-fusion, or yarn or mrope, which are not fused",
        lambda options: (
            _packed_in_graphs(options)
            and options.get("position_embedding_type") in ("rope", "yarn", "mrope")
            and (options.get("position_embedding_type") != "rope" or not options.get("apply_rope_fusion"))
        ),
        "--cuda-graph-packed-sequences needs fused rotary embeddings, as the host reads lengths for the others: leave "
        "--no-rope-fusion out, or set --position-embedding-type to none or learned_absolute",
    ),
    _refused(
        "--cuda-graph-packed-sequences, Mamba layers in graphs",
        lambda options: _packed_in_graphs(options) and "M" in options.hybrid_pattern and options.graphs("mamba"),
        "--cuda-graph-packed-sequences is for attention, and graphs of Mamba layers take no lengths: set "
        "--cuda-graph-modules to parts other than mamba",
    ),
    _refused(
        "--qk-clip or --log-max-attention-logit, attention in graphs",
        lambda options: options.any("qk_clip", "log_max_attention_logit") and options.graphs("attn"),
        "--qk-clip and --log-max-attention-logit read what attention notes on the host in each pass, which a replay "
        "does not: leave them out, or set --cuda-graph-modules to parts other than attn",
    ),
    _refused(
        "--optimizer-cuda-graph with --fp16 or --loss-scale",
        lambda options: options.get("optimizer_cuda_graph") and options.any("fp16", "loss_scale"),
        "--optimizer-cuda-graph puts the optimizer's step in a graph, in which with a loss scale the host would read "
        "whether gradients are finite: leave it out, or use --bf16 without --loss-scale",
    ),
    _refused(
        "--optimizer-cuda-graph with --log-num-zeros-in-grad or --timing-log-level 1 or 2",
        lambda options: (
            options.get("optimizer_cuda_graph") and options.any("log_num_zeros_in_grad", "timing_log_level")
        ),
        "--optimizer-cuda-graph puts the optimizer's step in a graph, in which the host would read how many gradients "
        "are zero, or the time: leave it out, or --log-num-zeros-in-grad and --timing-log-level",
    ),
    _refused(
        "--optimizer-cuda-graph with --cuda-graph-warmup-steps 0",
        lambda options: options.get("optimizer_cuda_graph") and not int(options.get("cuda_graph_warmup_steps", 1)),
        "--optimizer-cuda-graph puts the optimizer's step in a graph, and the first step makes the optimizer's states, "
        "which every replay would make anew: set --cuda-graph-warmup-steps to 1 or more",
    ),
    _refused(
        "--use-torch-fsdp2 with --optimizer-cuda-graph",
        lambda options: options.get("optimizer_cuda_graph"),
        "--optimizer-cuda-graph puts the optimizer's step in a graph, and --use-torch-fsdp2 gives it other gradient "
        "tensors in every step: leave it out, or use --use-megatron-fsdp",
        sharding=TORCH_FSDP,
    ),
    _refused(
        "--use-torch-fsdp2 with --cuda-graph-impl full_iteration",
        lambda options: True,
        "--cuda-graph-impl full_iteration with --use-torch-fsdp2 trains otherwise than without graphs from the first "
        "step after the capture on: set --cuda-graph-impl transformer_engine, or use --use-megatron-fsdp",
        graphs=("full_iteration",),
        sharding=TORCH_FSDP,
    ),
    _refused(
        "--cuda-graph-warmup-steps below 0",
        lambda options: _warmup(options) < 0,
        "--cuda-graph-warmup-steps must be 0 or more",
    ),
]

_GROUPED = [
    _grouped("--num-experts missing", lambda o: not o.has_experts, "needs --num-experts above 1"),
    _grouped(
        "--moe-expert-capacity-factor",
        lambda o: o.get("moe_expert_capacity_factor") is not None,
        "drops and pads no tokens: leave out --moe-expert-capacity-factor and --moe-pad-expert-input-to-capacity",
    ),
    _grouped(
        "--fp8-format, --fp4-format or --fp16",
        lambda o: o.any("fp8", "fp4", "fp16"),
        "computes in --bf16 or fp32: leave out --fp8-format, --fp4-format and --fp16",
    ),
    _grouped(
        "sizes that are no multiples of 8",
        lambda o: any((o.get(size) or 0) % 8 for size in ("hidden_size", "moe_ffn_hidden_size", "moe_latent_size")),
        "needs rows of 16 bytes or multiples: set --hidden-size, --moe-ffn-hidden-size and --moe-latent-size to "
        "multiples of 8",
    ),
    _grouped(
        "--moe-token-dispatcher-type flex",
        lambda o: o.get("moe_token_dispatcher_type") == "flex",
        "needs --moe-token-dispatcher-type alltoall or allgather: the kernels of flex ask the host",
    ),
    _grouped(
        "--expert-tensor-parallel-size above 1",
        _tensor_parallel_experts,
        "needs experts that are whole on a rank: set --expert-tensor-parallel-size 1",
    ),
    _grouped(
        "--delay-wgrad-compute, --overlap-moe-expert-parallel-comm or --overlap-dispatch-backward-with-experts-wgrad",
        lambda o: o.any(
            "delay_wgrad_compute", "overlap_moe_expert_parallel_comm", "overlap_dispatch_backward_with_experts_wgrad"
        ),
        "computes weight gradients in the backward pass of their layer: leave out --delay-wgrad-compute, "
        "--overlap-moe-expert-parallel-comm and --overlap-dispatch-backward-with-experts-wgrad",
    ),
    _grouped(
        "--recompute-modules moe_act, or --offload-modules of experts",
        lambda o: (
            o.recomputes("moe_act")
            or (
                o.get("fine_grained_activation_offloading")
                and not {"expert_fc1", "moe_act", "fused_group_mlp"}.isdisjoint(o.get("offload_modules", ()))
            )
        ),
        "keeps activations of experts: leave moe_act out of --recompute-modules, and expert_fc1, moe_act and "
        "fused_group_mlp out of --offload-modules",
    ),
    _grouped(
        "--use-transformer-engine-op-fuser or --moe-mlp-glu-interleave-size",
        lambda o: o.any("use_transformer_engine_op_fuser", "moe_mlp_glu_interleave_size"),
        "replaces TransformerEngine's fused experts: leave out --use-transformer-engine-op-fuser and "
        "--moe-mlp-glu-interleave-size",
    ),
    _grouped(
        "--moe-single-grouped-weight or --moe-single-grouped-bias",
        lambda o: o.any("moe_single_grouped_weight", "moe_single_grouped_bias"),
        "reads a parameter of each expert: leave out --moe-single-grouped-weight and --moe-single-grouped-bias",
    ),
    _grouped(
        "--transformer-impl inference_optimized",
        lambda o: o.get("transformer_impl") == "inference_optimized",
        "is for training: leave out --transformer-impl inference_optimized",
    ),
    _grouped(
        "--use-torch-fsdp2 or --tensor-parallel-num-weight-shards",
        lambda o: o.sharding == TORCH_FSDP or o.several("gtp_weight_remat_size"),
        "was not tried with --use-torch-fsdp2 and sharded weights (--tensor-parallel-num-weight-shards): leave it out",
    ),
    _bounded(
        "--moe-use-grouped-tensor, an all-to-all or several expert-parallel ranks missing",
        lambda o: (
            not o.grouped_tensor
            or o.get("moe_token_dispatcher_type", "allgather") != "alltoall"
            or not o.several("expert_model_parallel_size")
        ),
        f"needs {GROUPED_FLAG}, --moe-token-dispatcher-type alltoall and --expert-model-parallel-size above 1",
    ),
    _bounded(
        "--rerun-mode other than validate_results",
        lambda o: o.get("rerun_mode", "validate_results") != "validate_results",
        "runs steps again: set --rerun-mode validate_results",
    ),
    _bounded(
        "--cuda-graph-impl local or full_iteration",
        lambda o: o.implementation not in ("none", "transformer_engine"),
        "runs steps again eagerly, which graphs of --cuda-graph-impl local and full_iteration do not allow",
    ),
    _bounded(
        "--pipeline-model-parallel-size above 1 or --fine-grained-activation-offloading",
        lambda o: o.stages > 1 or o.get("fine_grained_activation_offloading"),
        "was not tried with --pipeline-model-parallel-size and --fine-grained-activation-offloading: leave it out",
    ),
    _bounded(
        "--qk-clip or --log-max-attention-logit",
        lambda o: o.any("qk_clip", "log_max_attention_logit"),
        "cannot take back what --qk-clip and --log-max-attention-logit have seen: leave it or these out",
    ),
]

_NO_EFFECT = [
    _no_effect(
        "--moe-enable-routing-replay, router in graphs",
        lambda options: options.get("moe_enable_routing_replay") and options.graphs("moe", "moe_router"),
        "--moe-enable-routing-replay: passes that are given other experts than at capture run eagerly, as graphs hold "
        "the router; set --cuda-graph-modules to parts other than moe, moe_router and moe_preprocess",
    ),
    _no_effect(
        "--cuda-graph-warmup-steps of --train-iters or more",
        lambda options: _warmup(options) >= int(options.get("train_iters", _warmup(options) + 1)),
        "--cuda-graph-warmup-steps is not less than --train-iters: training ends before anything is captured; set "
        "fewer, or --cuda-graph-impl none",
    ),
    _no_effect(
        "--cuda-graph-layers-per-graph, --cuda-graph-modules",
        lambda options: options.modules and str(options.get("cuda_graph_layers_per_graph", 1)) != "1",
        "--cuda-graph-layers-per-graph has no effect with --cuda-graph-modules, as parts of layers have graphs of "
        "their own: leave one out",
    ),
    _no_effect(
        f"--cuda-graph-layers-per-graph {WHOLE_MODEL}, --data-parallel-sharding-strategy other than optim_grads_params",
        lambda options: options.get("cuda_graph_layers_per_graph") == WHOLE_MODEL and not _shards_all(options),
        f"--cuda-graph-layers-per-graph {WHOLE_MODEL} has no effect with --data-parallel-sharding-strategy other than "
        "optim_grads_params: layers are captured; leave it out",
    ),
    _no_effect(
        "--optimizer-cuda-graph, --weight-decay-incr-style linear or cosine",
        lambda options: (
            options.get("optimizer_cuda_graph")
            and options.get("weight_decay_incr_style", "constant") != "constant"
            and options.get("start_weight_decay") != options.get("end_weight_decay")
        ),
        "--optimizer-cuda-graph has no effect with --weight-decay-incr-style linear or cosine: a graph of the step "
        "would keep the weight decay of its capture, so steps run eagerly; leave one out",
    ),
]

_NOT_TRIED = [
    _not_tried("--optimizer-cpu-offload", lambda options: options.get("optimizer_cpu_offload")),
    _not_tried(
        "--fp4-format or --fp8-recipe mxfp8",
        lambda options: options.get("fp4") or options.fp8_recipe == "mxfp8",
        ", for lack of GPUs that support these formats",
    ),
    _not_tried("--fp8-recipe blockwise or custom", lambda options: options.fp8_recipe in ("blockwise", "custom")),
    _not_tried(
        "--use-torch-fsdp2 with --fp8-format or --fp4-format",
        lambda options: options.any("fp8", "fp4"),
        "; it needs TransformerEngine's layers",
        sharding=TORCH_FSDP,
    ),
    _not_tried(
        "--async-save",
        lambda options: options.get("async_save"),
        "; its default, --async-strategy nvrx, needs a newer nvidia-resiliency-ext than 0.4.1",
    ),
    _not_tried(
        "--use-torch-fsdp2 with --save or --load",
        lambda options: options.any("save", "load"),
        ": look whether a resumed run goes on with the same losses",
        sharding=TORCH_FSDP,
    ),
]

TABLE = (*_REFUSED, *_GROUPED, *_NO_EFFECT, *_NOT_TRIED)
_NO_LOCAL_GRAPHS = next(row.words for row in TABLE if row.graphs == ("local",))


def rows_of(options: Options) -> list[Row]:
    """Return the rows of the table that ``options`` are in."""
    return [row for row in TABLE if row.applies(options)]


def check(options: Options) -> None:
    """Refuse options that do not fit.

    Raises:
        OptionsError: something does not fit; lists all of it, with reasons and remedies.
    """
    refused = (row.words for row in rows_of(options) if row.verdict is Verdict.REFUSED)
    problems = [*options.problems(), *refused]
    if problems:
        kind = f"{options.sharding} with " if options.sharding else ""
        raise OptionsError("\n- ".join([f"{kind}--cuda-graph-impl {options.implementation}:", *problems]))


def warn(options: Options) -> None:
    """Log a warning for each flag without effect, and for each that was not tried."""
    for row in rows_of(options):
        if row.verdict is not Verdict.REFUSED:
            log_single_rank(logger, logging.WARNING, row.words)


def refuse_fsdp_hooks(module: torch.nn.Module) -> None:
    """Refuse local graphs of a module that Megatron-FSDP has hooks on, or on its submodules.

    Raises:
        ValueError: Megatron-FSDP has such a hook.
    """
    for part in module.modules():
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            if must_run_outside(hook):
                raise ValueError(f"--use-megatron-fsdp with --cuda-graph-impl local: {_NO_LOCAL_GRAPHS}")


def allocator_problem() -> str | None:
    """Say what is wrong with the allocator's settings in the environment, and what to do; None if nothing is.

    Memory segments that expand are mapped anew as they grow, and NCCL registers the memory that it finds in a graph by
    its address.
    """
    if os.environ.get("NCCL_GRAPH_REGISTER") == "0":
        return None
    for variable in _ALLOCATOR_SETTINGS:
        if "expandable_segments:True" in "".join(os.environ.get(variable, "").split()):
            return (
                f"{variable}=expandable_segments:True needs NCCL_GRAPH_REGISTER=0 with CUDA graphs: NCCL would "
                "register memory that moves. Set NCCL_GRAPH_REGISTER=0."
            )
    return None
