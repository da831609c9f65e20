"""Define the models to train, as flags of ``megatron.training``."""

import re
from dataclasses import dataclass

DENSE = "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
MOE = (
    "--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall --disable-bias-linear"
)
# The architecture of DeepSeek-V3 with one dense layer and three MoE layers.
DEEPSEEK = (
    "--multi-latent-attention --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --moe-layer-freq [0]+[1]*3 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 "
    "--moe-token-dispatcher-type alltoall"
)
# Released models: sizes from the configurations that their authors published.
LLAMA = "--group-query-attention --num-query-groups 8 --normalization RMSNorm --swiglu --disable-bias-linear"
QWEN = (
    "--group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --moe-router-topk 8 --moe-permute-fusion "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall"
)

# TransformerEngine needs no mask tensor for causal attention.
ON_GPUS = "--transformer-impl transformer_engine --no-create-attention-mask-in-dataloader --bf16 --vocab-size 32000"
ON_CPU = (
    "--transformer-impl local --distributed-backend gloo --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-gradient-reduce-div-fusion --bf16 "
    "--vocab-size 256 --num-workers 0"
)

LOG_INTERVAL = 10
NO_FUSION = "--no-gradient-accumulation-fusion"
# Common to all variants, except NO_FUSION. Graphs need TransformerEngine's RNG tracker.
TRAINING = (
    "--micro-batch-size 1 --lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 --clip-grad 1 "
    f"--eval-iters 0 --eval-interval 100000 --log-interval {LOG_INTERVAL} --te-rng-tracker "
    f"{NO_FUSION} --mock-data --tokenizer-type NullTokenizer"
)


def _sizes(layers: int, hidden: int, heads: int, sequence: int) -> str:
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {sequence} "
        f"--max-position-embeddings {sequence}"
    )


def _experts(hidden: int) -> str:
    return f"--moe-ffn-hidden-size {hidden} --moe-shared-expert-intermediate-size {hidden}"


def _deepseek(experts: int, topk: int, hidden: int, query_rank: int, rank: int) -> str:
    ranks = f"--q-lora-rank {query_rank} --kv-lora-rank {rank}"
    return f"{DEEPSEEK} --num-experts {experts} --moe-router-topk {topk} {_experts(hidden)} {ranks}"


def _heads(size: int, rotary: int) -> str:
    return f"--qk-head-dim {size} --qk-pos-emb-head-dim {rotary} --v-head-dim {size}"


@dataclass(frozen=True)
class Configuration:
    """A model to train.

    Attributes:
        name: Name on the command line.
        flags: Flags common to all variants.
        graph_flags: Flags for ``--cuda-graph-impl transformer_engine`` only.
        has_dynamic_shapes: Whether the model has experts. The host reads their token counts in each step, except
            in variants with ``--moe-use-grouped-tensor``.
    """

    name: str
    flags: tuple[str, ...]
    graph_flags: tuple[str, ...] = ()
    has_dynamic_shapes: bool = False

    @property
    def layout(self) -> dict[str, str]:
        """Flags that select process groups, with their values. Runs in the same processes need equal layouts."""
        last = dict(zip(self.flags, self.flags[1:], strict=False))
        return {flag: value for flag, value in last.items() if LAYOUT.fullmatch(flag) and value != "1"}


GPU_MODELS = {
    "A": _sizes(16, 2048, 16, 2048),
    "B": _sizes(8, 1024, 16, 512),
    "C": f"{_sizes(8, 2048, 16, 2048)} {MOE} {_experts(2048)} --moe-grouped-gemm",
    "D": f"{_sizes(4, 1024, 16, 512)} {_deepseek(32, 8, 512, 512, 512)} --ffn-hidden-size 2816 --moe-grouped-gemm "
    "--moe-permute-fusion --use-precision-aware-optimizer",
    "llama-3.2-3b": f"{_sizes(28, 3072, 24, 4096)} {LLAMA} --ffn-hidden-size 8192 --vocab-size 128256",
    "llama-3.1-8b": f"{_sizes(32, 4096, 32, 4096)} {LLAMA} --ffn-hidden-size 14336 --vocab-size 128256 "
    "--untie-embeddings-and-output-weights",
    "qwen3-30b-a3b": f"{_sizes(8, 2048, 32, 4096)} {QWEN} --num-experts 128 --moe-ffn-hidden-size 768 "
    "--ffn-hidden-size 6144 --vocab-size 151936 --moe-grouped-gemm",
    "deepseek-v3": f"{_sizes(4, 7168, 128, 4096)} {_deepseek(64, 8, 2048, 1536, 512)} {_heads(128, 64)} "
    "--ffn-hidden-size 18432 --vocab-size 129280 --moe-router-topk-scaling-factor 2.5 --moe-grouped-gemm "
    "--moe-permute-fusion --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16",
}
CPU_MODELS = {
    "A": _sizes(4, 64, 4, 32),
    "B": _sizes(2, 32, 4, 16),
    "C": f"{_sizes(2, 64, 4, 32)} {MOE} {_experts(64)}",
    "D": f"{_sizes(4, 64, 4, 32)} {_deepseek(8, 4, 32, 32, 32)} {_heads(16, 8)}",
    **dict.fromkeys(("llama-3.2-3b", "llama-3.1-8b"), f"{_sizes(2, 64, 8, 32)} {LLAMA} --vocab-size 256"),
    "qwen3-30b-a3b": f"{_sizes(2, 64, 4, 32)} {QWEN} --num-experts 16 --moe-ffn-hidden-size 32 --vocab-size 256 "
    "~--moe-permute-fusion",
    "deepseek-v3": f"{_sizes(4, 64, 4, 32)} {_deepseek(8, 4, 32, 32, 32)} {_heads(16, 8)}",
}
# Values of --cuda-graph-modules for MoE models.
MODULES = {
    "C": ("attn", "moe_router", "moe_preprocess"),
    **dict.fromkeys(("D", "deepseek-v3"), ("attn", "mlp", "moe_router", "moe_preprocess")),
    "qwen3-30b-a3b": ("attn", "moe_router", "moe_preprocess"),
}
LAYOUT = re.compile(r"--([a-z]+-)+parallel-size|--num-distributed-optimizer-instances")
MICRO_BATCHES = {"D": 2}  # per rank and step, if greater than 1


def configuration(text: str, *, ranks: int, steps: int, on_cpu: bool) -> Configuration:
    """Return a configuration by name, for example ``A`` or ``A:--num-layers 32``.

    Args:
        text: Name, and flags after a colon. MoE models with several ranks use EP2 unless flags set another size.
        ranks: Number of ranks.
        steps: Length of the learning rate schedule.
        on_cpu: Whether to return the tiny models for the CPU backend.

    Raises:
        ValueError: The name is unknown.
    """
    name, _, more = text.partition(":")
    models = CPU_MODELS if on_cpu else GPU_MODELS
    if name not in models:
        raise ValueError(
            f"unknown configuration {name!r}: choose from {', '.join(models)}, and append flags after a colon"
        )
    experts = name in MODULES
    parts = [DENSE, ON_CPU if on_cpu else ON_GPUS, TRAINING, models[name]]
    parts.append(
        f"--global-batch-size {ranks * MICRO_BATCHES.get(name, 1)} --lr-decay-iters {steps} --train-iters {steps}"
    )
    if experts:
        parts.append(f"--expert-model-parallel-size {min(2, ranks)}")
    flags = tuple(" ".join([*parts, more]).split())
    graphs = ("--cuda-graph-modules", *MODULES[name]) if experts else ()
    return Configuration(text, flags, graphs, has_dynamic_shapes=experts)
