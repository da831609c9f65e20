"""The flags that were found to work together with a sharded model and CUDA graphs: one table for docs and tests."""

from dataclasses import dataclass

from megatron.core.transformer._cuda_graphs.flags.table import MEGATRON_FSDP, TORCH_FSDP

_CPU = "tests/integration_tests/test_fsdp_graphs.py"
_STAGES = "tests/integration_tests/test_fsdp_pipeline.py"
_TORCH = "tests/integration_tests/test_torch_fsdp.py"
_OVERLAP = "tests/integration_tests/test_expert_parallel_overlap.py"
_PACKED_TEST = "tests/integration_tests/test_packed_sequences.py"
_HYBRID = "tests/integration_tests/test_hybrid_models.py"
_PRETRAIN = "tests/integration_tests/test_pretrain_flags.py"
_RESUMED = "tests/integration_tests/test_resumed_runs.py"
_INSTANCES = "tests/integration_tests/test_hybrid_sharding.py"
_AVERAGED = "tests/integration_tests/test_unsharded_gradients.py"
_GROUPED = "tests/integration_tests/test_grouped_experts.py"
_BOUNDS = "tests/integration_tests/test_token_bounds.py"
_USER_CODE = "tests/integration_tests/test_user_code.py"
_GPU = "tests/gpu/test_fsdp_graphs.py"
_GPU_FLAGS = "tests/gpu/test_fsdp_flags.py"


@dataclass(frozen=True)
class Working:
    """Flags that work together with a sharded model and CUDA graphs.

    Attributes:
        name: What pairs of features that are trained together call it.
        flags: What it is about, in one line; no other, and no row of the product's table, has the same.
        shown: The test that shows it, as a path in this repository.
        words: A remark, or nothing.
        holds: What a graph holds at most, ``model``, ``layers`` (one each) or ``parts`` of them.
    """

    name: str
    flags: str
    shown: str
    words: str = ""
    holds: str = "model"
    sharding: str = MEGATRON_FSDP


WORKING = (
    Working("whole layers", "--cuda-graph-modules not given, dense model", _CPU),
    Working("attention", "--cuda-graph-modules attn", _CPU, holds="parts"),
    Working("mlp", "--cuda-graph-modules mlp, dense layers", _CPU, holds="parts"),
    Working("router", "--cuda-graph-modules moe_router", _CPU, holds="parts"),
    Working("up to the dispatch", "--cuda-graph-modules attn moe_router moe_preprocess", _CPU, holds="parts"),
    Working("padded experts", "--moe-pad-expert-input-to-capacity, whole layers or --cuda-graph-modules moe", _CPU),
    Working(
        "dropless experts",
        "--moe-use-grouped-tensor, whole layers or --cuda-graph-modules attn, moe_router or moe_preprocess",
        _GROUPED,
        "with --moe-router-topk above 2 add --moe-permute-fusion, without which no run repeats another's bits on a GPU",
    ),
    Working(
        "bounded tokens",
        "--moe-alltoall-capacity-factor",
        _BOUNDS,
        "with --moe-use-grouped-tensor and --moe-token-dispatcher-type alltoall",
    ),
    Working("overlapped shared experts", "--moe-shared-expert-overlap", _CPU, holds="parts"),
    Working("tied embeddings", "tied embeddings (--untie-embeddings-and-output-weights not given)", _CPU),
    Working("positions", "--position-embedding-type learned_absolute, rope, yarn, mrope or none", _CPU),
    Working(
        "hybrid models",
        "--hybrid-layer-pattern",
        _HYBRID,
        "Mamba layers were tried with another mixer than that of mamba-ssm",
    ),
    Working(
        "packed sequences in graphs",
        "--cuda-graph-packed-sequences",
        _PACKED_TEST,
        "whoever makes the batches calls megatron.core.packed_seq_params.pad_packed_seq_params, in the eager training "
        "of a comparison too; with --context-parallel-size on the CPU backend only, with another attention than "
        "TransformerEngine's",
    ),
    Working(
        "packed sequences beside graphs",
        "--sft or --dataloader-inter-document-masking, attention not in graphs",
        _PACKED_TEST,
        "verified on the CPU backend only, with another attention than TransformerEngine's",
        holds="parts",
    ),
    Working("heterogeneous layers", "--heterogeneous-layers-config-path", _PRETRAIN),
    Working(
        "fp16",
        "--fp16, with a dynamic or a constant loss scale",
        _CPU,
        "with a dynamic scale --cuda-graph-warmup-steps count from the first step that is not skipped",
    ),
    Working("bf16", "--bf16", _CPU),
    Working(
        "checkpoints",
        "--save, --load",
        _RESUMED,
        "runs with and without graphs load each other's checkpoints; of two pipeline stages into one and back, too",
    ),
    Working("dropout", "--hidden-dropout, --attention-dropout", _CPU),
    Working(
        "recomputation",
        "--recompute-modules core_attn, mlp, layernorm, moe, shared_experts, mla_up_proj",
        _GPU,
        "saves memory in graphs of the whole model and of all layers, and in what runs eagerly; in graphs of single "
        "layers only layernorm and mla_up_proj do",
    ),
    Working(
        "recomputation of layers",
        "--recompute-granularity full, graphs of the whole model or of all layers",
        _CPU,
        "where these are ruled out nothing is captured",
    ),
    Working("strategies", "--data-parallel-sharding-strategy other than optim_grads_params", _CPU, holds="layers"),
    Working(
        "hybrid sharding",
        "--num-distributed-optimizer-instances, --outer-dp-sharding-strategy",
        _INSTANCES,
        "with --outer-dp-sharding-strategy optim the patch scales gradients and clips them as without instances, which "
        "megatron-core does not",
    ),
    Working(
        "fused weight gradients of sharded parameters",
        "fused gradient accumulation (--no-gradient-accumulation-fusion not given)",
        _CPU,
    ),
    Working(
        "multi-token prediction",
        "--mtp-num-layers",
        _CPU,
        "in graphs of the whole model if forward_step gives the model a loss_mask of float32, as Megatron's does",
    ),
    Working(
        "optimizer graph",
        "--optimizer-cuda-graph",
        _GPU,
        "checkpoints are for runs with it and without",
    ),
    Working("tensor parallel", "--tensor-model-parallel-size, --sequence-parallel", _GPU),
    Working("pipeline", "--pipeline-model-parallel-size", _STAGES, "each stage as a whole, or its layers"),
    Working(
        "interleaved stages",
        "--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank",
        _STAGES,
    ),
    Working(
        "expert parallel",
        "--expert-model-parallel-size, --expert-tensor-parallel-size",
        _GPU,
        "with --data-parallel-sharding-strategy no_shard the patch clips by a norm of the experts of all ranks, which "
        "megatron-core does not",
    ),
    Working(
        "expert parallel overlap",
        "--overlap-moe-expert-parallel-comm, --cuda-graph-modules attn, moe_router or moe_preprocess",
        _OVERLAP,
        "weights other than experts stay in memory, gathered, from capture on",
        holds="parts",
    ),
    Working(
        "fp8",
        "--fp8-format, --fp8-recipe delayed or tensorwise",
        _GPU,
        "graphs of the whole model, or of all layers, update the statistics of delayed scaling too",
    ),
    Working("fp8 parameters", "--fp8-param-gather, --fp8-recipe delayed or tensorwise", _GPU_FLAGS),
    Working(
        "context parallel",
        "--context-parallel-size",
        _GPU_FLAGS,
        "graphs of the whole model were tried on the CPU backend only, with another attention than TransformerEngine's",
    ),
    Working(
        "torch fsdp2",
        "--use-torch-fsdp2",
        _TORCH,
        "layers with graphs are still gathered before each pass, but keep the memory of their parameters between "
        "passes",
        sharding=TORCH_FSDP,
        holds="layers",
    ),
    Working("user buffers", "--use-nccl-ub", _GPU_FLAGS),
    Working("all-gather group", "--create-all-gather-group", _PRETRAIN),
    Working("averaging collectives", "--ddp-average-in-collective", _AVERAGED),
    Working(
        "training loop",
        "--manual-gc, --empty-unused-memory-level, --log-params-norm, --log-memory-to-tensorboard, "
        "--use-pytorch-profiler, --rampup-batch-size, --full-validation, --dataloader-type external",
        _USER_CODE,
        "--full-validation needs --multiple-validation-sets: without it megatron-core ends the training",
    ),
    Working("latent attention", "--multi-latent-attention", _CPU),
)
