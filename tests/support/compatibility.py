"""List the flags that work with CUDA graphs of a sharded model, and write ``docs/compatibility.md``.

python -m tests.support.compatibility > docs/compatibility.md
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.core.transformer._cuda_graphs.flags.options import MEGATRON_FSDP, TORCH_FSDP
from megatron.core.transformer._cuda_graphs.flags.table import TABLE, Row, Verdict

_CPU = "tests/integration_tests/test_fsdp_graphs.py"
_STAGES = "tests/integration_tests/test_fsdp_pipeline.py"
_TORCH = "tests/integration_tests/test_torch_fsdp.py"
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

# Flags of a small model, which examples extend or override
FITTING = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 1 --train-iters 5 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 64
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --attention-dropout 0 --hidden-dropout 0
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor
    --cuda-graph-impl transformer_engine --fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail
"""
MOE = "--num-experts 4 --moe-token-dispatcher-type alltoall --disable-bias-linear"
UP_TO_DISPATCH = f"{MOE} --cuda-graph-modules attn moe_router moe_preprocess"
PADDED = "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0"
PACKED = "--cuda-graph-packed-sequences 4"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OVERLAP = "--overlap-moe-expert-parallel-comm --bf16"
TORCH = "--use-torch-fsdp2 --untie-embeddings-and-output-weights"
STAGES = "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"


def command_line(example: str) -> list[str]:
    """Return ``FITTING`` and the flags of an example, without the flags that follow a ``!``."""
    words = example.split()
    line = FITTING
    for left_out in (word[1:] for word in words if word.startswith("!")):
        line = re.sub(rf"--{left_out}( [^-]\S*)?(?=\s)", "", line)
    return [*line.split(), *(word for word in words if not word.startswith("!"))]


@dataclass(frozen=True)
class Working:
    """Flags that work together with a sharded model and CUDA graphs.

    Attributes:
        name: Name in ``pairs.FEATURES``.
        flags: The flags on one line, unique among all rows.
        shown: Path of the test that covers the flags.
        example: Example flags for ``command_line``.
        words: Remark; may be empty.
        holds: The largest unit of a graph: ``model``, ``layers`` or ``parts``.
        sharding: The required wrapper.
    """

    name: str
    flags: str
    shown: str
    example: str
    words: str = ""
    holds: str = "model"
    sharding: str = MEGATRON_FSDP


WORKING = (
    Working("whole layers", "--cuda-graph-modules not given, dense model", _CPU, ""),
    Working("attention", "--cuda-graph-modules attn", _CPU, "--cuda-graph-modules attn", holds="parts"),
    Working("mlp", "--cuda-graph-modules mlp, dense layers", _CPU, "--cuda-graph-modules mlp", holds="parts"),
    Working("router", "--cuda-graph-modules moe_router", _CPU, f"{MOE} --cuda-graph-modules moe_router", holds="parts"),
    Working(
        "up to the dispatch",
        "--cuda-graph-modules attn moe_router moe_preprocess",
        _CPU,
        f"{UP_TO_DISPATCH}",
        holds="parts",
    ),
    Working(
        "padded experts",
        "--moe-pad-expert-input-to-capacity, whole layers or --cuda-graph-modules moe",
        _CPU,
        f"{MOE} {PADDED}",
    ),
    Working(
        "dropless experts",
        "--moe-use-grouped-tensor, whole layers or --cuda-graph-modules attn, moe_router or moe_preprocess",
        _GROUPED,
        f"{MOE} --moe-use-grouped-tensor",
        "with --moe-router-topk above 2 add --moe-permute-fusion, without which no run repeats another's bits on a GPU",
    ),
    Working(
        "bounded tokens",
        "--moe-alltoall-capacity-factor",
        _BOUNDS,
        f"{MOE} --moe-use-grouped-tensor --expert-model-parallel-size 2 --moe-alltoall-capacity-factor 1.25",
        "with --moe-use-grouped-tensor and --moe-token-dispatcher-type alltoall",
    ),
    Working(
        "overlapped shared experts",
        "--moe-shared-expert-overlap",
        _CPU,
        f"{UP_TO_DISPATCH} --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap",
        holds="parts",
    ),
    Working("tied embeddings", "tied embeddings (--untie-embeddings-and-output-weights not given)", _CPU, ""),
    Working(
        "positions",
        "--position-embedding-type learned_absolute, rope, yarn, mrope or none",
        _CPU,
        "--position-embedding-type yarn",
    ),
    Working(
        "hybrid models",
        "--hybrid-layer-pattern",
        _HYBRID,
        "--hybrid-layer-pattern *-*-",
        "Mamba layers were tried with another mixer than that of mamba-ssm",
    ),
    Working(
        "packed sequences in graphs",
        "--cuda-graph-packed-sequences",
        _PACKED_TEST,
        f"--sft {PACKED} --position-embedding-type none",
        "whoever makes the batches calls megatron.core.packed_seq_params.pad_packed_seq_params, in the eager training "
        "of a comparison too; with --context-parallel-size on the CPU backend only, with another attention than "
        "TransformerEngine's",
    ),
    Working(
        "packed sequences beside graphs",
        "--sft or --dataloader-inter-document-masking, attention not in graphs",
        _PACKED_TEST,
        "--sft --cuda-graph-modules mlp",
        "verified on the CPU backend only, with another attention than TransformerEngine's",
        holds="parts",
    ),
    Working(
        "heterogeneous layers",
        "--heterogeneous-layers-config-path",
        _PRETRAIN,
        "--heterogeneous-layers-config-path layers.json",
    ),
    Working(
        "fp16",
        "--fp16, with a dynamic or a constant loss scale",
        _CPU,
        "--fp16",
        "with a dynamic scale --cuda-graph-warmup-steps count from the first step that is not skipped",
    ),
    Working("bf16", "--bf16", _CPU, "--bf16"),
    Working(
        "checkpoints",
        "--save, --load",
        _RESUMED,
        "--load checkpoints",
        "runs with and without graphs load each other's checkpoints; of two pipeline stages into one and back, too",
    ),
    Working("dropout", "--hidden-dropout, --attention-dropout", _CPU, "--hidden-dropout 0.1"),
    Working(
        "recomputation",
        "--recompute-modules core_attn, mlp, layernorm, moe, shared_experts, mla_up_proj",
        _GPU,
        f"{SELECTIVE} core_attn",
        "saves memory in graphs of the whole model and of all layers, and in what runs eagerly; in graphs of single "
        "layers only layernorm and mla_up_proj do",
    ),
    Working(
        "recomputation of layers",
        "--recompute-granularity full, graphs of the whole model or of all layers",
        _CPU,
        f"{FULL}",
        "where these are ruled out nothing is captured",
    ),
    Working(
        "strategies",
        "--data-parallel-sharding-strategy other than optim_grads_params",
        _CPU,
        "--data-parallel-sharding-strategy optim_grads",
        holds="layers",
    ),
    Working(
        "hybrid sharding",
        "--num-distributed-optimizer-instances, --outer-dp-sharding-strategy",
        _INSTANCES,
        "--num-distributed-optimizer-instances 2 --overlap-grad-reduce --outer-dp-sharding-strategy optim",
        "with --outer-dp-sharding-strategy optim the patch scales gradients and clips them as without instances, which "
        "megatron-core does not",
    ),
    Working(
        "fused weight gradients of sharded parameters",
        "fused gradient accumulation (--no-gradient-accumulation-fusion not given)",
        _CPU,
        "!no-gradient-accumulation-fusion",
    ),
    Working(
        "multi-token prediction",
        "--mtp-num-layers",
        _CPU,
        "--mtp-num-layers 1 --position-embedding-type rope",
        "in graphs of the whole model if forward_step gives the model a loss_mask of float32, as Megatron's does",
    ),
    Working(
        "optimizer graph",
        "--optimizer-cuda-graph",
        _GPU,
        "--optimizer-cuda-graph",
        "checkpoints are for runs with it and without",
    ),
    Working(
        "tensor parallel", "--tensor-model-parallel-size, --sequence-parallel", _GPU, "--tensor-model-parallel-size 2"
    ),
    Working("pipeline", "--pipeline-model-parallel-size", _STAGES, f"{STAGES}", "each stage as a whole, or its layers"),
    Working(
        "interleaved stages",
        "--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank",
        _STAGES,
        f"{STAGES} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
    ),
    Working(
        "expert parallel",
        "--expert-model-parallel-size, --expert-tensor-parallel-size",
        _GPU,
        f"{MOE} --moe-use-grouped-tensor --expert-model-parallel-size 2",
        "with --data-parallel-sharding-strategy no_shard the patch clips by a norm of the experts of all ranks, which "
        "megatron-core does not",
    ),
    Working(
        "fp8",
        "--fp8-format, --fp8-recipe delayed or tensorwise",
        _GPU,
        "--fp8-format hybrid",
        "graphs of the whole model, or of all layers, update the statistics of delayed scaling too",
    ),
    Working(
        "fp8 parameters",
        "--fp8-param-gather, --fp8-recipe delayed or tensorwise",
        _GPU_FLAGS,
        "--fp8-format hybrid --fp8-param-gather",
    ),
    Working(
        "context parallel",
        "--context-parallel-size",
        _GPU_FLAGS,
        "!transformer-impl --context-parallel-size 2",
    ),
    Working(
        "torch fsdp2",
        "--use-torch-fsdp2",
        _TORCH,
        f"!use-megatron-fsdp !data-parallel-sharding-strategy !ckpt-format {TORCH}",
        "layers with graphs are still gathered before each pass, but keep the memory of their parameters between "
        "passes",
        sharding=TORCH_FSDP,
        holds="layers",
    ),
    Working("user buffers", "--use-nccl-ub", _GPU_FLAGS, "--use-nccl-ub"),
    Working("all-gather group", "--create-all-gather-group", _PRETRAIN, "--create-all-gather-group"),
    Working("averaging collectives", "--ddp-average-in-collective", _AVERAGED, "--ddp-average-in-collective"),
    Working(
        "training loop",
        "--manual-gc, --empty-unused-memory-level, --log-params-norm, --log-memory-to-tensorboard, "
        "--use-pytorch-profiler, --rampup-batch-size, --full-validation, --dataloader-type external",
        _USER_CODE,
        "--manual-gc --empty-unused-memory-level 2",
        "--full-validation needs --multiple-validation-sets: without it megatron-core ends the training",
    ),
    Working("latent attention", "--multi-latent-attention", _CPU, "--multi-latent-attention"),
)
HEAD = """\
# What works: Megatron's flags with CUDA graphs

This page covers `--cuda-graph-impl transformer_engine` with `--use-megatron-fsdp`, or with `--use-torch-fsdp2` where a
row names it.

- **works**: bit-identical to training without graphs, as the linked test shows. The scope follows: a graph can hold the
  whole `model`, `layers`, or `parts` of layers; everything else runs eagerly
  ([Guide](guide.md#choose-how-much-one-graph-holds)). [Results](results.md#equal-to-eager-training) lists the hardware.
- **refused**: an error with this text before training. All refused flags of a job are listed at once.
- **no effect**, **not tried**: a warning with this text.

A flag without a row is passed through untested. `make docs` generates this page from
`megatron/core/transformer/_cuda_graphs/flags/table.py` and `tests/support/compatibility.py`.
"""
ROWS: tuple[Row | Working, ...] = (*WORKING, *TABLE)
# Topics by the beginning of a row's flags; the first match wins
TOPICS: dict[str, tuple[str, ...]] = {
    "What graphs hold": ("--cuda-graph-impl", "--cuda-graph-modules", "--cuda-graph-layers", "--cuda-graph-warmup"),
    "Sharding and Megatron-FSDP's buffers": (
        "--fsdp-",
        "--data-parallel-sharding",
        "--num-distributed-optimizer",
        "--outer-dp",
        "fused gradient accumulation",
        "--use-nccl-ub",
        "--create-all-gather-group",
        "--ddp-",
        "--megatron-fsdp-version",
    ),
    "torch's FSDP2": ("--use-torch-fsdp2",),
    "Mixture of experts": ("--num-experts", "--moe-", "--mlp-chunks", "--expert-", "--overlap-moe", "--delay-wgrad"),
    "Tensor, pipeline and context parallelism": (
        "--tensor-",
        "--pipeline-",
        "--num-layers-per-virtual",
        "--microbatch-group",
        "--context-",
    ),
    "Models": (
        "tied embeddings",
        "--position-",
        "--hybrid-",
        "--heterogeneous-",
        "--mtp-",
        "--multi-latent",
        "--transformer-impl",
        "--hidden-dropout",
        "--qk-clip",
    ),
    "Packed sequences": ("--cuda-graph-packed", "--sft"),
    "Precision": ("--bf16", "--fp16", "--fp8-", "--fp4-"),
    "Recomputation": ("--recompute-", "--distribute-saved-activations"),
    "Optimizer and checkpoints": ("--optimizer", "--save", "--async-save", "--non-persistent-save"),
    "Training loop": ("--manual-gc",),
    "Other flags": ("",),
}


def page(table: Iterable[Row | Working] = ROWS) -> str:
    """Return the Markdown page for ``table``."""
    by_topic: dict[str, list[Row | Working]] = {title: [] for title in TOPICS}
    for row in table:
        by_topic[next(title for title, flags in TOPICS.items() if row.flags.startswith(flags))].append(row)
    parts = [HEAD]
    for title, rows in by_topic.items():
        if rows:
            rows.sort(key=_rank)
            lines = [f"| {_cell(row.flags)} | {_verdict(row)} | {_cell(row.words)} |" for row in rows]
            parts.append(
                "\n".join([f"## {title}", "", "| flags | verdict | what to know |", "|---|---|---|", *lines, ""])
            )
    return "\n".join(parts)


def _rank(row: Row | Working) -> int:
    return -1 if isinstance(row, Working) else list(Verdict).index(row.verdict)


def _verdict(row: Row | Working) -> str:
    return f"[works](../{row.shown}): {row.holds}" if isinstance(row, Working) else row.verdict.value


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
