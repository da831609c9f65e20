"""Results of ``step_time.py`` as Markdown."""

from collections.abc import Mapping
from typing import Any

from . import report
from .configurations import DESCRIPTIONS

NAMES = {
    "eager": "Megatron-FSDP, eager",
    "native": "graphs, this engine",
    "te": "graphs of layers, TransformerEngine's engine",
    "full_iteration": "one graph for all passes",
    "ddp": "`DistributedDataParallel`, eager",
    "ddp_graphs": "`DistributedDataParallel`, graphs of layers",
}
PACKAGES = ("torch", "megatron-core", "transformer-engine")
WITH_OPTIMIZER = "+optimizer"
LAYERS_PER_GRAPH = "native::--cuda-graph-layers-per-graph="
HEADER = (
    "ms per step",
    "to eager",
    "to one graph for all passes",
    "to compute",
    "memory: MiB",
    "capture: s",
    "launches and replays",
    "equal steps",
)


def heading_of(configuration: str, results: Mapping[str, Any]) -> str:
    """Say what a configuration in a JSON file of ``step_time.py`` is; the CPU backend's are smaller than described."""
    name, _, flags = configuration.partition(":")
    if "note" in results:
        return configuration
    return f"{name}: {DESCRIPTIONS[name]}" + f", `{flags}`" * bool(flags)


def variant_name(variant: str) -> str:
    """Say what a variant of ``step_time.py`` is."""
    if variant in (f"{LAYERS_PER_GRAPH}all", f"{LAYERS_PER_GRAPH}model"):
        return f"{NAMES['native']}, of {'layers only' if variant.endswith('all') else 'the whole model'}"
    name, colon, more = variant.partition(":")
    base = name.removesuffix(WITH_OPTIMIZER)
    text = NAMES[base] + ", the optimizer's graph" * (base != name)
    return text + f", `{more.strip(':')}`" * bool(colon)


def section(results: Mapping[str, Any]) -> str:
    """Return the tables of a JSON file of ``step_time.py``, each configuration's behind what it is."""
    known = [f"{name} {results['versions'][name]}" for name in PACKAGES if name in results["versions"]]
    parts = [f"{results['hardware']}, {', '.join(known)}; `{results['command']}`:\n"]
    if "note" in results:
        parts.append(f"{results['note']}\n")
    parts += [_table(heading_of(name, results), rows) for name, rows in results["configurations"].items()]
    return "\n".join(parts)


def _table(title: str, rows: list[dict[str, Any]]) -> str:
    table = [list(HEADER), *map(_cells, rows)]
    filled = [column for column in zip(*table, strict=True) if any(column[1:])]
    names = [title, *(variant_name(row["variant"]) for row in rows)]
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in zip(names, zip(*filled, strict=True), strict=True)]
    lines.insert(1, "|---" * (len(filled) + 1) + "|")
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [report.failures(row)[0].replace("|", "/"), *[""] * (len(HEADER) - 1)]
    calls = row.get("profile", {}).get("calls")
    launches = f"{calls['launches']:.0f} + {calls['graph_launches']:.0f}" if calls else ""
    equal = f"{row['equal_steps']} of {row['steps']}" if row["reference"] else ""
    if row.get("repeatable") is False:
        equal += " (two runs differ)"
    captured = f"{row['capture_seconds']:.2f}" if row["graphs"] else ""
    ratios = [_number(row[f"ratio_to_{other}"]) for other in ("eager", "full_iteration", "compute")]
    reserved = row.get("reserved_mib")
    memory = "" if not reserved else str(reserved)
    return [f"{row['ms']:.1f}", *ratios, memory, captured, launches, equal]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
