"""List the flags that work with CUDA graphs of a sharded model, and write ``docs/compatibility.md``.

python -m tests.support.compatibility > docs/compatibility.md
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.core.transformer._cuda_graphs.flags.table import TABLE, Row, Verdict
from tests.support import verified
from tests.support.pretraining import pairs

_CPU = "tests/integration_tests/test_fsdp_graphs.py"
_STAGES = "tests/integration_tests/test_fsdp_pipeline.py"
_PACKED_TEST = "tests/integration_tests/test_packed_sequences.py"
_HYBRID = "tests/integration_tests/test_hybrid_models.py"
_PAIRS = "tests/integration_tests/test_pairs.py"
_RESUMED = "tests/integration_tests/test_resumed_runs.py"
_INSTANCES = "tests/integration_tests/test_hybrid_sharding.py"
_AVERAGED = "tests/integration_tests/test_unsharded_gradients.py"
_GROUPED = "tests/integration_tests/test_grouped_experts.py"
_BOUNDS = "tests/integration_tests/test_token_bounds.py"
_USER_CODE = "tests/integration_tests/test_user_code.py"
_FROZEN = "tests/integration_tests/test_frozen_parameters.py"
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
PADDED = "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0"
PACKED = "--cuda-graph-packed-sequences 4"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OVERLAP = "--overlap-moe-expert-parallel-comm --bf16"
TORCH = "--use-torch-fsdp2 --untie-embeddings-and-output-weights"
STAGES = "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"


def command_line(example: str) -> list[str]:
    """Return ``FITTING`` plus the flags of ``example``; ``!NAME`` in ``example`` removes ``--NAME``."""
    words = example.split()
    line = FITTING
    for left_out in (word[1:] for word in words if word.startswith("!")):
        line = re.sub(rf"--{left_out}( [^-]\S*)?(?=\s)", "", line)
    return [*line.split(), *(word for word in words if not word.startswith("!"))]


@dataclass(frozen=True)
class Working:
    """Row of the flag table: flags that work with CUDA graphs of a sharded model.

    Attributes:
        name: Name in ``pairs.FEATURES``.
        flags: Flags with their values, and the condition that all flags share (see ``split``). Unique among rows.
        shown: Path of the test that covers the flags.
        words: Remark; may be empty.
        holds: The largest unit of a graph: ``model``, ``layers`` or ``parts``.
        example: Example flags for ``command_line``; None for the flags of the feature ``name``.
    """

    name: str
    flags: str
    shown: str
    words: str = ""
    holds: str = "model"
    example: str | None = None

    @property
    def line(self) -> list[str]:
        """Flags of an example command line."""
        return pairs.planned([self.name]) if self.example is None else command_line(self.example)


WORKING = (
    Working(
        "whole layers",
        "--cuda-graph-layers-per-graph model or 1, --cuda-graph-modules not given",
        _CPU,
        example="",
    ),
    Working("attention", "--cuda-graph-modules attn", _CPU, holds="parts"),
    Working("mlp", "--cuda-graph-modules mlp with dense layers", _CPU, holds="parts"),
    Working("router", "--cuda-graph-modules moe_router", _CPU, holds="parts"),
    Working(
        "up to the dispatch",
        "--cuda-graph-modules attn moe_router moe_preprocess, --num-experts",
        _CPU,
        "experts run eagerly",
        holds="parts",
    ),
    Working(
        "padded experts",
        "--moe-pad-expert-input-to-capacity",
        _CPU,
        "graphs hold whole MoE layers, but tokens are dropped",
    ),
    Working(
        "padded experts",
        "--cuda-graph-modules moe with --moe-pad-expert-input-to-capacity",
        _CPU,
        holds="parts",
        example=f"{MOE} {PADDED} --cuda-graph-modules moe",
    ),
    Working(
        "dropless experts",
        "--moe-use-grouped-tensor",
        _GROUPED,
        "without --cuda-graph-modules, graphs hold whole MoE layers; with --moe-router-topk above 2, add "
        "--moe-permute-fusion",
    ),
    Working(
        "bounded tokens",
        "--moe-alltoall-capacity-factor",
        _BOUNDS,
        "needs --moe-use-grouped-tensor and --moe-token-dispatcher-type alltoall",
    ),
    Working("overlapped shared experts", "--moe-shared-expert-overlap", _CPU, holds="parts"),
    Working("tied embeddings", "--untie-embeddings-and-output-weights not given", _CPU, "tied weights"),
    Working(
        "positions",
        "--position-embedding-type learned_absolute, rope, yarn, mrope or none",
        _CPU,
        example="--position-embedding-type yarn",
    ),
    Working(
        "hybrid models",
        "--hybrid-layer-pattern",
        _HYBRID,
        "Mamba layers are verified with a stand-in for mamba-ssm's mixer",
    ),
    Working(
        "hybrid models",
        "--cuda-graph-modules mamba with --hybrid-layer-pattern",
        _HYBRID,
        holds="parts",
        example="--hybrid-layer-pattern M-M- --cuda-graph-modules mamba",
    ),
    Working(
        "packed sequences in graphs",
        "--cuda-graph-packed-sequences",
        _PACKED_TEST,
        "forward_step must call megatron.core.packed_seq_params.pad_packed_seq_params, also in eager runs that you "
        "compare with",
    ),
    Working(
        "packed sequences beside graphs",
        "--sft, --dataloader-inter-document-masking with attention outside graphs",
        _PACKED_TEST,
        "verified with a stand-in for TransformerEngine's attention",
        holds="parts",
    ),
    Working("heterogeneous layers", "--heterogeneous-layers-config-path", _PAIRS),
    Working("fp16", "--fp16", _CPU),
    Working("bf16", "--bf16", _CPU),
    Working(
        "checkpoints",
        "--save, --load",
        _RESUMED,
        "runs with and without graphs load each other's checkpoints, also with other parallel sizes",
    ),
    Working("dropout", "--hidden-dropout, --attention-dropout", _CPU),
    Working(
        "recomputation",
        "--recompute-modules core_attn, mlp, layernorm, moe, shared_experts, mla_up_proj",
        _GPU,
        "saves memory in graphs of the whole model and in eager modules; in graphs per layer, only layernorm and "
        "mla_up_proj are recomputed",
    ),
    Working(
        "recomputation of layers",
        "--recompute-granularity full",
        _CPU,
        "only in a graph of the whole model",
    ),
    Working(
        "strategies",
        "--data-parallel-sharding-strategy optim_grads, optim or no_shard",
        _CPU,
        holds="layers",
        example="--data-parallel-sharding-strategy optim_grads",
    ),
    Working(
        "hybrid sharding",
        "--outer-dp-sharding-strategy, --num-distributed-optimizer-instances",
        _INSTANCES,
        "HSDP: needs --overlap-grad-reduce; with optim, the patch fixes how gradients are scaled and clipped",
    ),
    Working(
        "fused weight gradients of sharded parameters",
        "--no-gradient-accumulation-fusion not given",
        _CPU,
        "needs Apex",
    ),
    Working(
        "multi-token prediction",
        "--mtp-num-layers",
        _CPU,
        "a graph of the whole model needs a float32 loss_mask from forward_step, as Megatron's provides",
    ),
    Working("decoupled learning rate", "--decoupled-lr", _FROZEN, example="--decoupled-lr 1e-2"),
    Working("tensor parallel", "--tensor-model-parallel-size, --sequence-parallel", _GPU),
    Working("pipeline", "--pipeline-model-parallel-size", _STAGES, "a graph holds a whole stage or one of its layers"),
    Working(
        "interleaved stages", "--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank", _STAGES
    ),
    Working(
        "expert parallel",
        "--expert-model-parallel-size, --expert-tensor-parallel-size",
        _GPU,
        "with --data-parallel-sharding-strategy no_shard, the patch clips by a norm that includes all ranks' experts",
        example=f"{MOE} --moe-use-grouped-tensor --expert-model-parallel-size 2",
    ),
    Working(
        "fp8",
        "--fp8-recipe delayed or tensorwise, --fp8-format",
        _GPU,
        "graphs of the whole model also update the statistics of delayed scaling",
        example="--fp8-format hybrid",
    ),
    Working(
        "fp8 by blocks",
        "--fp8-recipe blockwise",
        _GPU,
        holds="layers",
        example="--fp8-format hybrid --fp8-recipe blockwise",
    ),
    Working(
        "fp8 parameters",
        "--fp8-param-gather with --fp8-recipe delayed or tensorwise",
        _GPU_FLAGS,
        example="--fp8-format hybrid --fp8-param-gather",
    ),
    Working(
        "context parallel",
        "--context-parallel-size",
        _GPU_FLAGS,
        "on the CPU, verified with a stand-in for TransformerEngine's attention",
    ),
    Working("user buffers", "--use-nccl-ub", _GPU_FLAGS, example="--use-nccl-ub"),
    Working("all-gather group", "--create-all-gather-group", _PAIRS),
    Working("averaging collectives", "--ddp-average-in-collective", _AVERAGED),
    Working(
        "training loop",
        "--manual-gc, --empty-unused-memory-level, --log-params-norm, --log-memory-to-tensorboard, "
        "--use-pytorch-profiler, --rampup-batch-size, --full-validation, --dataloader-type external",
        _USER_CODE,
    ),
    Working("latent attention", "--multi-latent-attention", _CPU, example="--multi-latent-attention"),
)


@dataclass(frozen=True)
class Failing:
    """Row of the flag table: accepted flags that fail or train wrongly under Megatron-FSDP, with and without graphs.

    Attributes:
        flags: As in ``Working``.
        words: Remark; may be empty.
    """

    flags: str
    words: str = ""


FAILING = (
    Failing(
        "--num-distributed-optimizer-instances without --overlap-grad-reduce",
        "gradients are never reduced across HSDP replicas",
    ),
    Failing(
        "--outer-dp-sharding-strategy optim with one HSDP replica or one-rank replicas, or without optim_grads_params"
    ),
    Failing("--recompute-modules mlp without --disable-bias-linear", "the backward pass never ends"),
    Failing("--distribute-saved-activations, --non-persistent-save-interval, --optimizer sgd"),
    Failing("--defer-embedding-wgrad-compute, --freeze-all-layers"),
    Failing("--save-params-interval, --save-wgrads-interval", "the files are unusable"),
    Failing("--overlap-moe-expert-parallel-comm with pipeline stages or --moe-shared-expert-overlap"),
    Failing("--num-experts with --tensor-model-parallel-size above 1 and without --sequence-parallel"),
    Failing("--save with --swiglu and --data-parallel-sharding-strategy no_shard"),
    Failing(
        "--init-model-with-meta-device with pipeline stages that share the embedding",
        "each stage gets different weights",
    ),
    Failing("--mtp-num-layers with pipeline stages and a --hybrid-layer-pattern without layers after a /"),
    Failing("--microbatch-group-size-per-virtual-pipeline-stage above the number of micro-batches"),
    Failing("--context-parallel-size with --transformer-impl local and without --spec"),
    Failing("--ddp-reduce-scatter-with-fp32-accumulation", "has no effect: set --megatron-fsdp-main-grads-dtype fp32"),
)
HEAD = """\
# What works: Megatron's flags with CUDA graphs, A to Z

This page covers `--cuda-graph-impl transformer_engine` with `--use-megatron-fsdp`. A flag without a row is passed
through untested.

- **works**: bit-identical to training without graphs, according to the linked test. `graph` is the largest part of a
  model that one graph can hold: the whole `model`, single `layers`, or `parts` of layers
  ([Guide](guide.md#choose-how-much-one-graph-holds)). `CPU` (the CPU backend), `H100` and `H200` show where this was
  verified, for all values (`yes`) or for those listed.
- **refused**: an error before training, with the text in the last column, where `…` is the flag or the whole first
  column. All refused flags of a job are listed.
- **no effect**, **not tried**: a warning with the text in the last column.
- **fails**: fails or trains wrongly under Megatron-FSDP, with and without graphs. The patch does not reject it.

`make docs` generates this page.

| flag | status | graph | CPU | H100 | H200 | what to know |
|---|---|---|---|---|---|---|
"""
Line = Row | Working | Failing
ROWS: tuple[Line, ...] = (*WORKING, *TABLE, *FAILING)
STATUSES = ("works", *(verdict.value for verdict in Verdict), "fails")  # order of the rows of one flag
_CONDITION = re.compile(r" (?=with |without |and )")
_NEXT_FLAG = re.compile(r",? (?:or )?(?=--)")


def page(table: Iterable[Line] = ROWS) -> str:
    """Return the Markdown page for ``table``."""
    tested = {fact for feature in pairs.FEATURES.values() for fact in _facts(feature)}
    hardware = (tested, verified.facts_on("H100"), verified.facts_on("H200"))
    lines = sorted((order, line) for row in table for order, line in _lines(row, hardware))
    tests = sorted({row.shown for row in table if isinstance(row, Working)})
    links = [f"[{_test(shown)}]: ../{shown}" for shown in tests]
    return "\n".join([HEAD + "\n".join(line for _, line in lines), "", *links, ""])


def split(flags: str) -> list[tuple[str, str]]:
    """Split a row's flags, and pair each flag and its values with the condition that all flags share.

    ``--a x or y, --b with c`` becomes ``--a x or y`` and ``--b``, both with the condition ``with c``.
    """
    head, *condition = _CONDITION.split(flags, maxsplit=1)
    return [(item, "".join(condition)) for item in _NEXT_FLAG.split(head)]


def verified_values(item: str, facts: set[str]) -> str:
    """Return ``yes`` if ``facts`` contain all values of the flag ``item``, otherwise the values that they contain."""
    flag, *values = re.sub(r",| or\b", "", item).split()
    found = [value for value in values if f"{flag} {value}" in facts]
    return "yes" if item in facts or (values and found == values) else ", ".join(found)


def _lines(row: Line, hardware: tuple[set[str], ...]) -> Iterator[tuple[tuple[str, int, str], str]]:
    """Yield a sort key and a table line for each flag of ``row``; ``hardware`` are the facts verified on each kind."""
    (first, _), *_ = items = split(row.flags)
    for item, condition in items:
        flag, shown = item.split()[0], f"{item} {condition}".strip()
        words = row.words if item == first or not row.words else f"see {first.split()[0]}"
        for repeated in (shown, flag):
            if words.startswith(repeated):
                words = f"…{words.removeprefix(repeated)}"
        if isinstance(row, Working):
            found = [verified_values(item, facts) for facts in hardware]
            found[0] = "yes" if row.shown.startswith("tests/integration_tests/") else found[0]
            status, cells = "works", (f"[works][{_test(row.shown)}]", row.holds, *found)
        else:
            status = row.verdict.value if isinstance(row, Row) else "fails"
            cells = (status, "", "", "", "")
        yield (
            (flag, STATUSES.index(status), shown),
            "".join(f"| {cell} " if cell else "| " for cell in (shown, *cells, words)) + "|",
        )


def _test(path: str) -> str:
    """Return a short name for a test file."""
    return Path(path).stem.removeprefix("test_") + (" on GPUs" if path.startswith("tests/gpu/") else "")


def _facts(feature: pairs.Setting) -> Iterator[str]:
    for flag, value in feature.items():
        if value is not False:
            yield from (flag, *(f"{flag} {each}" for each in str(value).split()))


if __name__ == "__main__":
    print(page(), end="")
