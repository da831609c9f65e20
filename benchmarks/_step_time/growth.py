"""How the figures of a variant grow with layers and with micro-batches."""

from collections.abc import Mapping, Sequence
from typing import Any

from . import report

Row = Mapping[str, Any]
# Of these, what one more layer costs.
COSTS = ("ms", "host_ms", "max_reserved_mib", "max_allocated_mib", "capture_seconds", "graphs", "api_calls")
MEMORY = ("max_allocated_mib", "max_reserved_mib")
# Less than this is not called growth: tokens and losses of a micro-batch, rounded to the allocator's blocks.
SAME_MIB = 16
COLUMNS: report.Columns = (
    ("layers", ("layers",)),
    ("micro-b.", ("micro_batches",)),
    ("ms", ("ms",)),
    ("/eager", ("ratio_to_eager",)),
    ("host ms", ("host_ms",)),
    ("alloc MiB", ("max_allocated_mib",)),
    ("res. MiB", ("max_reserved_mib",)),
    ("capture s", ("capture_seconds",)),
    ("graphs", ("graphs",)),
    ("API calls", ("api_calls",)),
    ("python", ("profile", "python_calls")),
)


def row(found: Row, layers: int, micro_batches: int) -> dict[str, Any]:
    """Return a row of ``report.rows`` with the size of its model, host time and all CUDA API calls of a step."""
    profile = found.get("profile", {})
    calls = profile.get("api_calls")
    return {
        "layers": layers,
        "micro_batches": micro_batches,
        **found,
        "host_ms": profile.get("host_ms"),
        "api_calls": None if calls is None else round(sum(calls.values()), 2),
    }


def with_layers(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """What one more layer costs each variant, between the fewest and most layers with the fewest micro-batches."""
    costs = {}
    for variant, measured in _by_variant(rows).items():
        fewest = min(each["micro_batches"] for each in measured)
        line = sorted((each for each in measured if each["micro_batches"] == fewest), key=lambda each: each["layers"])
        small, large = line[0], line[-1]
        more = large["layers"] - small["layers"]
        known = [name for name in COSTS if more and small.get(name) is not None and large.get(name) is not None]
        costs[variant] = {name: round((large[name] - small[name]) / more, 3) for name in known}
    return costs


def with_micro_batches(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """Peak memory of each variant with the fewest and the most micro-batches, and whether it grew.

    Returns:
        By variant, for each number of layers that was measured with several numbers of micro-batches: ``layers``,
        ``micro_batches``, the two; ``max_allocated_mib`` and ``max_reserved_mib``, with each of the two; and
        ``grows``, whether tensors take at least ``SAME_MIB`` more. Empty where memory is not measured.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for variant, measured in _by_variant(rows).items():
        found[variant] = []
        for layers in sorted({each["layers"] for each in measured}):
            line = [each for each in measured if each["layers"] == layers]
            line.sort(key=lambda each: each["micro_batches"])
            if len(line) > 1 and line[0][MEMORY[0]]:
                ends = line[0], line[-1]
                taken = {name: [end[name] for end in ends] for name in MEMORY}
                allocated = taken[MEMORY[0]]
                found[variant].append(
                    {
                        "layers": layers,
                        "micro_batches": [end["micro_batches"] for end in ends],
                        **taken,
                        "grows": allocated[1] - allocated[0] >= SAME_MIB,
                    }
                )
    return found


def sentences(rows: Sequence[Row]) -> list[str]:
    """Say what a layer costs and whether memory grows with micro-batches."""
    lines = [
        f"{variant}: one more layer costs {', '.join(f'{name} {value:+}' for name, value in costs.items())}"
        for variant, costs in with_layers(rows).items()
        if costs
    ]
    for variant, each in with_micro_batches(rows).items():
        for one in each:
            few, many = one["micro_batches"]
            allocated, reserved = (f"{one[name][0]} -> {one[name][1]} MiB" for name in MEMORY)
            lines.append(
                f"{variant}, {one['layers']} layers: memory {'grows' if one['grows'] else 'does not grow'} from "
                f"{few} to {many} micro-batches: allocated {allocated}, reserved {reserved}"
            )
    return lines


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    return report.table(rows, COLUMNS)


def _by_variant(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for each in rows:
        if "ms" in each:
            found.setdefault(each["variant"], []).append(each)
    return found
