"""Writes ``docs/compatibility.md``: which flags work with per-layer CUDA graphs of a sharded model.

python -m megatron_fsdp_cuda_graphs.compatibility > docs/compatibility.md
"""

from collections.abc import Iterable

from megatron.core.transformer._cuda_graphs.flag_row import Row, Verdict
from megatron.core.transformer._cuda_graphs.flag_table import TABLE

HEAD = """\
# Flags and per-layer CUDA graphs under Megatron-FSDP

Made by `make docs` from `megatron/core/transformer/_cuda_graphs/flag_table.py`; the checks of arguments read the same
table. It is about `--cuda-graph-impl transformer_engine` with `--use-megatron-fsdp`, unless a row says otherwise. All
flags of a job that are refused are listed at once, and no job starts with one. What is in no row is not checked.
"""
SECTIONS = {
    Verdict.WORKS: "Works, bit for bit as without graphs",
    Verdict.REFUSED: "Refused before anything runs, with these words",
    Verdict.NO_EFFECT: "No effect: a warning with these words",
    Verdict.NOT_TRIED: "Not tried: a warning with these words",
}


def page(table: Iterable[Row] = TABLE) -> str:
    """Return the page for the rows of ``table``, as Markdown."""
    rows = list(table)
    parts = [HEAD]
    for verdict, title in SECTIONS.items():
        found = [row for row in rows if row.verdict is verdict]
        if found:
            parts.append("\n".join([f"## {title}", "", *_table(found), ""]))
    return "\n".join(parts)


def _table(rows: Iterable[Row]) -> list[str]:
    lines = ["| flags | what to know | test |", "|---|---|---|"]
    return lines + [f"| {_cell(row.flags)} | {_cell(row.words)} | {_shown(row)} |" for row in rows]


def _shown(row: Row) -> str:
    return f"`{row.shown}`" if row.shown else "none"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
