"""A capture's report as a table of text, for the log."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from .record import KINDS, CaptureReport, LayerRecord, total

_HEADER = ("graphs", *(kind.replace("_", " ") for kind in KINDS), "warm-up s", "capture s")


def table(report: CaptureReport) -> str:
    """Return the report in some lines; equal layers in a row are one."""
    rows = [_HEADER, *map(_layers_row, _alike(report.layers))]
    if report.whole_model:
        rows.append(("whole model", *map(number, report.graphs.values()), *_phases(report)))
    elif len(rows) > 2:
        rows.append(("all", *map(number, report.graphs.values()), *_phases(report)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"CUDA graphs, {report.engine} engine, rank 0:"]
    for what, *cells in rows:
        lines.append("  ".join([what.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]))
    return "\n  ".join([*lines, *_notes(report)])


def number(count: int | None) -> str:
    """Return ``count``; a question mark for None."""
    return "?" if count is None else str(count)


def in_bytes(count: int) -> str:
    """Return a number of bytes in MiB, or below one MiB in KiB."""
    return f"{count / 2**10:,.1f} KiB" if 0 < count < 2**20 else f"{count / 2**20:,.1f} MiB"


def span(names: Sequence[str]) -> str:
    """Name consecutive layers by the first and the last."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def hook_counts(report: CaptureReport) -> Counter[tuple[str, str, bool]]:
    """Count hooks by name, route, and whether they are on a layer rather than inside."""
    return Counter((hook.hook, hook.route, not hook.module) for hook in report.hooks)


def _alike(layers: Sequence[LayerRecord]) -> Iterator[list[LayerRecord]]:
    def key(place: tuple[int, LayerRecord]) -> tuple:
        layer = place[1]
        return layer.chunk, layer.recorded_with, () if layer.recorded_with is not None else tuple(layer.graphs.items())

    for _, places in groupby(enumerate(layers), key):
        yield [layer for _, layer in places]


def _layers_row(layers: Sequence[LayerRecord]) -> tuple[str, ...]:
    what = span([layer.name for layer in layers])
    if layers[0].recorded_with is not None:
        what += ", recorded together"
    return (
        what,
        *map(number, total([layer.graphs for layer in layers]).values()),
        f"{sum(layer.warm_up_seconds for layer in layers):.3f}",
        f"{sum(layer.capture_seconds for layer in layers):.3f}",
    )


def _phases(report: CaptureReport) -> tuple[str, str]:
    return f"{report.seconds['warm_up']:.3f}", f"{report.seconds['capture']:.3f}"


def _notes(report: CaptureReport) -> Iterator[str]:
    yield f"{report.seconds['total']:.2f} s in all, {report.seconds['waiting']:.2f} s of them waiting for other ranks"
    if report.collectives:
        yield f"{report.collectives} more graphs hold collectives alone"
    if report.memory:
        before, after = report.memory[0], report.memory[-1]
        yield (
            f"memory allocated {in_bytes(before.allocated)} -> {in_bytes(after.allocated)}, reserved "
            f"{in_bytes(before.reserved)} -> {in_bytes(after.reserved)}"
        )
    for pool in report.pools:
        yield f"a pool of {in_bytes(pool.bytes)} holds {pool.graphs} graphs"
    uses = sum(len(buffer.uses) for buffer in report.static_inputs)
    if uses:
        size = in_bytes(sum(buffer.bytes for buffer in report.static_inputs))
        yield f"{len(report.static_inputs)} static inputs of {size} serve {uses} uses"
    for (hook, route, on_layer), count in hook_counts(report).items():
        outside = "" if route in ("withheld", "recorded") else "outside of graphs, as "
        yield f"hook {hook}, {count} {'on layers' if on_layer else 'inside layers'}: {outside}{route}"
    for why, parts in groupby(report.eager, lambda part: part.why):
        yield f"eager: {', '.join(part.what for part in parts)}, because {why}"
