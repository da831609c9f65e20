"""Writes ``docs/compatibility.md``: which flags work with CUDA graphs of a sharded model, by topic.

python -m tests.support.compatibility > docs/compatibility.md
"""

from collections.abc import Iterable

from megatron.core.transformer._cuda_graphs.flags.table import TABLE, Row, Verdict
from tests.support.working_flags import WORKING, Working

HEAD = """\
# Which flags work with CUDA graphs

This page is about `--cuda-graph-impl transformer_engine` with `--use-megatron-fsdp`, or with `--use-torch-fsdp2` where
a row says so.

- **works**: the same bits as without graphs, shown by the test behind the link. What ran on which GPUs is in
  [measurements.md](measurements.md). Behind it what a graph holds at most: the whole `model`, one of its `layers`, or
  `parts` of a layer; all else is eager ([using.md](using.md#how-much-one-graph-holds)).
- **refused**: an error with these words before anything runs. All refused flags of a job are listed at once.
- **no effect**, **not tried**: a warning with these words.

A flag without a row is passed through untested.

`make docs` writes this page from `megatron/core/transformer/_cuda_graphs/flags/table.py`, which the checks of arguments
read too, and, of what works, from `tests/support/working_flags.py`.
"""
ROWS: tuple[Row | Working, ...] = (*WORKING, *TABLE)
# How the flags of a topic's rows begin; the first topic that fits.
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
    """Return the page for the rows of ``table``, as Markdown."""
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
