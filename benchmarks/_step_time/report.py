"""Compare the variants of a configuration, and format the results."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .variants import Variant

Result = Mapping[str, Any]
FULL_ITERATION, EAGER, ALONE = "full_iteration", "eager", "compute_alone"


def equal_steps(numbers: Sequence[Any], reference: Sequence[Any]) -> int:
    """Return the number of steps before the first difference in loss or gradient norm."""
    same = 0
    for mine, theirs in zip(numbers, reference, strict=False):
        if mine != theirs:
            break
        same += 1
    return same


def rows(variants: Sequence[Variant], timed: Mapping[str, Result], profiled: Mapping[str, Result]) -> list[dict]:
    """Return a row for each variant of a configuration.

    Args:
        variants: Variants in output order.
        timed: Results of timed runs by variant; a failed run has only 'error'.
        profiled: Results of profiled runs by variant.

    Returns:
        The measured values and the following ones; unavailable values are None or missing.

        - ``reference``: variant that must be bit-identical.
        - ``equal_steps``: number of steps before the first difference from the reference.
        - ``ratio_to_VARIANT``: step time relative to ``compute_alone``, ``eager`` or ``full_iteration``.
        - ``ratio_to_compute``: step time relative to the compute time of eager Megatron-FSDP. The latter is a lower
          bound for the same kernels on one stream.
        - ``repeatable``: whether losses and gradient norms of the profiled run equal the timed run's.
    """
    compute = _compute_ms(profiled.get(EAGER, {}))
    return [_row(each, variants, timed, profiled, compute) for each in variants if each.name in timed]


def _row(
    variant: Variant,
    variants: Sequence[Variant],
    timed: Mapping[str, Result],
    profiled: Mapping[str, Result],
    compute: float | None,
) -> dict[str, Any]:
    result = timed[variant.name]
    if "error" in result:
        return {"variant": variant.name, "error": _without_folders(result["error"])}
    row: dict[str, Any] = {"variant": variant.name}
    dropped = ("numbers", "run", "event")
    row |= {key: value for key, value in result.items() if key not in dropped}
    row["ratio_to_full_iteration"] = _ratio(result, timed.get(FULL_ITERATION))
    row["ratio_to_eager"] = _ratio(result, timed.get(EAGER))
    row["ratio_to_compute_alone"] = _ratio(result, timed.get(ALONE))
    row["ratio_to_compute"] = round(result["ms"] / compute, 3) if compute else None
    reference = _reference(variant, timed)
    row["steps"] = len(result["numbers"])
    row["reference"] = reference
    row["equal_steps"] = equal_steps(result["numbers"], timed[reference]["numbers"]) if reference else None
    if variant.name in profiled:
        again = profiled[variant.name]
        if "error" in again:
            row["profile_error"] = _without_folders(again["error"])
        else:
            same = equal_steps(again["numbers"], result["numbers"])
            row["repeatable"] = same == len(again["numbers"])
            row["profile"] = again["profile"]
    return row


def _reference(variant: Variant, timed: Mapping[str, Result]) -> str | None:
    ran = (name for name in variant.references if "numbers" in timed.get(name, {}))
    reference = next(ran, None)
    return None if reference == variant.name else reference


def _without_folders(error: str) -> str:
    """Return ``error`` with the folders removed from its paths, because results are published."""
    return re.sub(r"(?<![\w./])/(?:[\w.+@-]+/)+", "", error)


def _ratio(result: Result, other: Result | None) -> float | None:
    return round(result["ms"] / other["ms"], 3) if other and "ms" in other else None


def _compute_ms(result: Result) -> float | None:
    return result.get("profile", {}).get("compute_ms")


def kinds_of_kernels(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the GPU time by kind of kernel, in milliseconds, as one line per profiled variant."""
    return [
        f"{row['variant']}: "
        + ", ".join(f"{kind} {took:.1f}" for kind, took in row["profile"]["kinds"].items())
        + f"; idle {row['profile']['idle_ms']:.1f}, collectives alone {row['profile']['nccl_alone_ms']:.1f}"
        for row in found
        if row.get("profile", {}).get("kinds")
    ]


def failures(row: Mapping[str, Any]) -> list[str]:
    """Return the errors of a row, and differences from its reference."""
    found = []
    for key in ("error", "profile_error"):
        if key in row:
            found.append(row[key].strip().splitlines()[-1])
    if row.get("equal_steps") is not None and row["equal_steps"] != row["steps"]:
        found.append(f"differs from {row['reference']} in step {row['equal_steps'] + 1}")
    if row.get("repeatable") is False:
        found.append("two runs differ")
    return found


# Table headings, each with the keys of its values in a row.
Columns = Sequence[tuple[str, tuple[str, ...]]]
COLUMNS: Columns = (
    ("ms", ("ms",)),
    ("/full it.", ("ratio_to_full_iteration",)),
    ("/eager", ("ratio_to_eager",)),
    ("/alone", ("ratio_to_compute_alone",)),
    ("/compute", ("ratio_to_compute",)),
    ("tokens/s", ("tokens_per_second",)),
    ("TFLOP/s", ("tflops",)),
    ("MiB", ("reserved_mib",)),
    ("peak MiB", ("max_reserved_mib",)),
    ("graphs", ("graphs",)),
    ("capture s", ("capture_seconds",)),
    ("host ms", ("profile", "host_ms")),
    ("busy ms", ("profile", "gpu_busy_ms")),
    ("compute", ("profile", "compute_ms")),
    ("nccl", ("profile", "nccl_alone_ms")),
    ("launches", ("profile", "calls", "launches")),
    ("replays", ("profile", "calls", "graph_launches")),
    ("waits", ("profile", "calls", "stream_waits")),
    ("records", ("profile", "calls", "event_records")),
    ("queries", ("profile", "calls", "event_queries")),
    ("captur?", ("profile", "calls", "capture_queries")),
    ("copies", ("profile", "calls", "copies")),
    ("python", ("profile", "python_calls")),
)


def table(found: Sequence[Mapping[str, Any]], columns: Columns = COLUMNS) -> str:
    """Format the rows as a text table."""
    width = max([len(row["variant"]) for row in found] + [len("variant")])
    lines = ["  ".join([f"{'variant':<{width}}", *(f"{name:>9}" for name, _ in columns), "equal"])]
    for row in found:
        cells = [f"{_cell(row, path):>9}" for _, path in columns]
        equal = f"{row['equal_steps']}/{row['steps']} {row['reference']}" if row.get("reference") else "-"
        problems = "; ".join(failures(row))
        lines.append("  ".join([f"{row['variant']:<{width}}", *cells, equal, problems[:120]]).rstrip())
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], path: Sequence[str]) -> str:
    value: Any = row
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.3f}" if path[0].startswith("ratio") or path[0] == "capture_seconds" else f"{value:.1f}"
