"""Train with sets of flags that together cover every pair of compatible rows of the flag table.

A feature is named after a row of the flag table, or ``job: ...`` if there is no such row. It sets flags of
``pretrain.py`` (``True`` for a flag without a value) or removes them (``False``). ``pairs.json`` contains sets of
features with their numbers of ranks; any two compatible features share a set. Add a new feature to all sets that it is
compatible with.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.pretraining.pretrain import BATCH, FLAGS, GRAPHS, numbers, pretrain

Setting = Mapping[str, str | bool]
FILE = Path(__file__).with_name("pairs.json")
QUICK = (30, 41)  # sets in `make test`
STEPS, SAVED = 6, 3
CHECKPOINTS = "CHECKPOINTS"  # placeholder for a folder
MODULES, LAYERS = "--cuda-graph-modules", "--cuda-graph-layers-per-graph"
ONLY_WITH_GRAPHS = (LAYERS, "--cuda-graph-warmup-steps")
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS: Setting = {
    "--num-experts": "4",
    "--moe-router-topk": "2",
    "--moe-ffn-hidden-size": "32",
    "--moe-token-dispatcher-type": "alltoall",
    "--disable-bias-linear": True,
}
STAGES: Setting = {"--pipeline-model-parallel-size": "2"}
CHUNKS: Setting = {**STAGES, "--num-layers-per-virtual-pipeline-stage": "1"}
INSTANCES: Setting = {"--num-distributed-optimizer-instances": "2", "--overlap-grad-reduce": True}
SHARED: Setting = {"--moe-shared-expert-intermediate-size": "32", "--moe-shared-expert-overlap": True}
PACKED: Setting = {
    "--dataloader-inter-document-masking": True,
    "--spec": "tests.support.layers.packed_attention local_layer",
    "--micro-batch-size": "1",
    "--position-embedding-type": "learned_absolute",
}
PARTS = "attn moe_router moe_preprocess"


def heterogeneous_layers() -> str:
    """Return the JSON of four layers: the second without attention, the third without an MLP."""

    def layer(attention: bool, multiple: float | None) -> dict[str, Any]:
        return {
            "attention": {"n_heads_in_group": 2 if attention else None, "no_op": not attention},
            "ffn": {"ffn_mult": multiple, "no_op": multiple is None},
        }

    model = {
        "hidden_act": "silu",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "tie_word_embeddings": False,
        "rope_theta": 10000,
        "rope_scaling": {"factor": 8.0},
        "block_configs": [layer(True, 1.0), layer(False, 2.0), layer(True, None), layer(True, 1.0)],
    }
    return json.dumps(model, separators=(",", ":"))


def _heterogeneous() -> Setting:
    return {
        "--heterogeneous-layers-config-encoded-json": heterogeneous_layers(),
        "--no-bias-swiglu-fusion": True,
        "--swiglu": True,
        "--normalization": "RMSNorm",
        "--group-query-attention": True,
        "--num-query-groups": "2",
        "--use-rotary-position-embeddings": True,
        "--use-rope-scaling": True,
        "--rope-scaling-factor": "8.0",
        "--position-embedding-type": "rope",
        "--disable-bias-linear": True,
        UNTIED: True,
    }


BASE: Setting = {
    "--train-iters": str(STEPS),
    "--cuda-graph-warmup-steps": "2",
    "--num-layers": "4",
    "--hidden-dropout": "0",
    "--attention-dropout": "0",
}
# By row name, with a suffix if a row has several features
FEATURES: dict[str, Setting] = {
    "whole layers": {MODULES: False, LAYERS: "model"},
    "whole layers: one in a graph": {MODULES: False, LAYERS: "1"},
    "attention": {MODULES: "attn"},
    "mlp": {MODULES: "mlp", "--num-experts": False},
    "router": {**EXPERTS, MODULES: "moe_router"},
    "up to the dispatch": {**EXPERTS, MODULES: PARTS},
    "mlp: of some layers": {**EXPERTS, MODULES: "attn mlp moe_router", "--moe-layer-freq": "([0,1,0,1])"},
    "padded experts": {
        **EXPERTS,
        MODULES: False,
        "--moe-pad-expert-input-to-capacity": True,
        "--moe-expert-capacity-factor": "1.0",
    },
    "dropless experts": {**EXPERTS, MODULES: False, "--moe-use-grouped-tensor": True},
    "bounded tokens": {
        **EXPERTS,
        MODULES: False,
        "--moe-use-grouped-tensor": True,
        "--expert-model-parallel-size": "2",
        "--moe-alltoall-capacity-factor": "1.1",
    },
    "overlapped shared experts": {**EXPERTS, **SHARED, MODULES: PARTS},
    "attention: beside sinkhorn": {
        **EXPERTS,
        "--moe-router-topk": "1",
        "--moe-router-load-balancing-type": "sinkhorn",
        MODULES: "attn",
    },
    "all-gather group": {"--create-all-gather-group": True},
    "training loop": {"--manual-gc": True, "--manual-gc-interval": "2", "--empty-unused-memory-level": "2"},
    "averaging collectives": {"--ddp-average-in-collective": True},
    "tied embeddings": {UNTIED: False},
    "positions: learned": {"--position-embedding-type": "learned_absolute"},
    "positions: none": {"--position-embedding-type": "none"},
    "hybrid models": {
        "--hybrid-layer-pattern": "M*-M*-",  # every kind of layer in both stages
        "--spec": "tests.support.layers.hybrid_spec local",
        "--num-layers": False,
        "--num-experts": False,
    },
    "heterogeneous layers": _heterogeneous(),
    "fp16": {"--fp16": True, "--bf16": False, "--initial-loss-scale": "1024"},
    "job: fp32": {"--fp16": False, "--bf16": False},
    "bf16": {"--fp16": False, "--bf16": True},
    "dropout": {"--hidden-dropout": "0.1", "--attention-dropout": "0.1"},
    "recomputation": {"--recompute-granularity": "selective", "--recompute-modules": "core_attn"},
    "recomputation: mlp": {
        "--recompute-granularity": "selective",
        "--recompute-modules": "mlp",
        "--disable-bias-linear": True,
    },
    "recomputation of layers": {
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
        "--recompute-num-layers": "1",
        MODULES: False,
    },
    "job: chunked mlp": {"--mlp-chunks-for-training": "2"},
    "strategies: optim": {"--data-parallel-sharding-strategy": "optim"},
    "strategies: optim_grads": {"--data-parallel-sharding-strategy": "optim_grads"},
    "strategies: no_shard": {"--data-parallel-sharding-strategy": "no_shard"},
    "hybrid sharding": {**INSTANCES, "--outer-dp-sharding-strategy": "no_shard"},
    "hybrid sharding: of all": {**INSTANCES, "--outer-dp-sharding-strategy": "optim"},
    "job: overlapped collectives": {"--overlap-grad-reduce": True, "--overlap-param-gather": True},
    "fused weight gradients of sharded parameters": {"--no-gradient-accumulation-fusion": False},
    "multi-token prediction": {"--mtp-num-layers": "1"},
    "tensor parallel": {"--tensor-model-parallel-size": "2"},
    "pipeline": {**STAGES, "--num-layers-per-virtual-pipeline-stage": False},
    "interleaved stages": CHUNKS,
    "interleaved stages: flushed": {
        **CHUNKS,
        "--microbatch-group-size-per-virtual-pipeline-stage": "4",
        "--overlap-p2p-communication-warmup-flush": True,
        "--global-batch-size": "16",
    },
    "expert parallel": {**EXPERTS, "--expert-model-parallel-size": "2"},
    "packed sequences in graphs": {**PACKED, "--cuda-graph-packed-sequences": "32"},
    "packed sequences beside graphs": {**PACKED, MODULES: "mlp"},
    "context parallel": {
        "--context-parallel-size": "2",
        "--spec": "tests.support.layers.gathering_attention local_layers",
    },
    "job: evaluation": {"--eval-iters": "1", "--eval-interval": "2"},
    "checkpoints": {"--save": CHECKPOINTS, "--save-interval": str(SAVED)},
    "job: no warm-up": {"--cuda-graph-warmup-steps": "0"},
}
# Working rows without a feature: requirements that the CPU backend lacks, or another reason
ELSEWHERE = {
    "fp8": "TransformerEngine's layers",
    "fp8 by blocks": "TransformerEngine's layers",
    "fp8 parameters": "TransformerEngine's layers",
    "user buffers": "NCCL",
    "latent attention": "TransformerEngine's attention",
    "decoupled learning rate": "only affects the optimizer",
}


def joined(names: Iterable[str]) -> Setting | None:
    """Merge the flags of features; return None if two features set a flag differently."""
    found: dict[str, str | bool] = {}
    for name in names:
        for flag, value in FEATURES[name].items():
            if found.setdefault(flag, value) != value:
                return None
    return found


def command(names: Iterable[str]) -> list[str]:
    """Return the flags for training with these features, except the CUDA graph flags in ``GRAPHS``.

    Raises:
        ValueError: Two features set a flag differently.
    """
    setting = joined(names)
    if setting is None:
        raise ValueError(f"features cannot be combined: {', '.join(names)}")
    flags = {flag: values for flag, *values in _flags(f"{FLAGS} {BATCH}".split())}
    if setting.get("--num-experts") and MODULES not in setting:
        setting = {**setting, MODULES: PARTS}
    for flag, value in {**BASE, **setting}.items():
        flags[flag] = [] if value is True else str(value).split()
        if value is False:
            del flags[flag]
    return [word for flag, values in flags.items() for word in (flag, *values)]


def planned(names: Iterable[str]) -> list[str]:
    """Return the flags with which ``plan`` checks training with these features and graphs.

    Raises:
        ValueError: Two features set a flag differently.
    """
    return [*command(names), *GRAPHS[True].split(), "--mock-data"]


def _flags(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with its values."""
    starts = [index for index, word in enumerate(words) if word.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        yield [*words[start:end]]


def stored() -> list[tuple[tuple[str, ...], int]]:
    """Return the sets in ``FILE`` with their numbers of ranks."""
    return [(tuple(names), ranks) for names, ranks in json.loads(FILE.read_text())]


def train(names: Sequence[str], ranks: int, folder: Path, *, graphs: bool) -> list[dict[str, Any]]:
    """Train with features and return the metrics of each step; with graphs, resume in new processes.

    Raises:
        AssertionError: The run failed. The message includes the end of the log.
    """
    folder.mkdir()
    arguments = " ".join(command(names)).replace(CHECKPOINTS, str(folder / "checkpoints"))
    script = FILE.with_name("pretrain_with_stand_ins.py")
    options: dict[str, Any] = {"graphs": graphs, "base": "", "ranks": ranks, "script": script}
    if not graphs:
        arguments = " ".join(_without_graphs(arguments.split()))
    if "checkpoints" not in names or not graphs:
        return pretrain(folder / "run", arguments, **options)
    first = pretrain(folder / "first", f"{arguments} --exit-interval {SAVED}", **options)
    return first + pretrain(folder / "resumed", f"{arguments} --load {folder / 'checkpoints'}", **options)


def _without_graphs(words: Sequence[str]) -> list[str]:
    """Return ``words`` without the flags for graphs."""
    return [word for flag in _flags(words) if flag[0] not in ONLY_WITH_GRAPHS for word in flag]


def assert_as_eager(names: Sequence[str], ranks: int, folder: Path) -> None:
    """Assert that training with features and graphs is bit-identical to eager training and replays graphs."""
    eager, graphed = (train(names, ranks, folder / kind, graphs=kind == "graphed") for kind in ("eager", "graphed"))
    assert len(eager) == STEPS
    assert numbers(graphed) == numbers(eager)
    assert graphed[-1]["graphs"]
