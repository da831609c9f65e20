"""The pictures of a report, as SVG: memory, order of passes, lives of static inputs."""

import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from operator import attrgetter

from .record import BACKWARD, FORWARD, WEIGHT_GRADIENTS, CaptureReport, MemorySample
from .table import in_bytes

COLOURS = {FORWARD: "#4477aa", BACKWARD: "#cc6677", WEIGHT_GRADIENTS: "#b8a33a"}
ALLOCATED, RESERVED, CAPTURING = "#228833", "#777777", "#eef3f8"
_WIDTH, _LEFT, _TEXT = 900, 130, 12
MOST_BUFFERS = 80


def _svg(width: float, height: float, label: str, parts: Iterator[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, title: str = "", stroke: str = "none") -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {size} fill="{fill}" stroke="{stroke}" rx="2"><title>{escape(title)}</title></rect>'


def memory_chart(samples: Sequence[MemorySample]) -> str:
    """Draw the memory over the capture; empty if the allocator said nothing."""
    most = max((sample.reserved for sample in samples), default=0)
    if not most:
        return ""
    height, bottom, top = 280, 240, 20
    start, end = samples[0].time, samples[-1].time

    def x(time: float) -> float:
        return _LEFT + (time - start) / ((end - start) or 1) * (_WIDTH - _LEFT - 20)

    def y(count: int) -> float:
        return bottom - count / most * (bottom - top)

    def parts() -> Iterator[str]:
        captured = [sample.time for sample in samples if sample.phase in ("capture", "captured")]
        if captured:
            width = x(captured[-1]) - x(captured[0])
            yield _box(x(captured[0]), top, width, bottom - top, CAPTURING, "graphs are captured")
        for part in range(5):
            level, time = most * part // 4, start + (end - start) * part / 4
            yield f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y(level):.1f}" y2="{y(level):.1f}" stroke="#ddd"/>'
            yield _text(_LEFT - 6, y(level) + 4, in_bytes(level), "end")
            yield _text(x(time), bottom + 18, f"{time - start:.2f} s", "middle")
        for colour, read in ((RESERVED, attrgetter("reserved")), (ALLOCATED, attrgetter("allocated"))):
            points = " ".join(f"{x(sample.time):.1f},{y(read(sample)):.1f}" for sample in samples)
            yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            for sample in samples:
                title = f"{sample.phase}, {sample.time - start:.3f} s: {in_bytes(read(sample))}"
                place = f'cx="{x(sample.time):.1f}" cy="{y(read(sample)):.1f}"'
                yield f'<circle {place} r="3" fill="{colour}"><title>{escape(title)}</title></circle>'

    return _svg(_WIDTH, height, "memory over the capture", parts())


def pass_lanes(report: CaptureReport) -> str:
    """Draw the passes in their order, a lane for each chunk of the model."""
    step, lane, top = _step_width(report), 44, 10
    chunks = max((layer.chunk for layer in report.layers), default=0) + 1
    seconds = {(step.layer, step.micro_batch, step.kind): step.seconds for step in report.passes}

    def parts() -> Iterator[str]:
        for chunk in range(chunks):
            what = f"chunk {chunk}" if report.layers else "model"
            yield _text(4, top + chunk * lane + 20, what)
        for place, (layer, micro_batch, kind) in enumerate(report.order):
            x, y = _LEFT + place * step, top + _chunk(report, layer) * lane
            took = seconds.get((layer, micro_batch, kind))
            title = f"{_name(report, layer)}, micro-batch {micro_batch}, {kind.replace('_', ' ')}"
            yield _box(x, y, step - 2, 30, COLOURS[kind], title + ("" if took is None else f": {took * 1e3:.1f} ms"))
            if step >= 18:
                yield f'<g class="on">{_text(x + step / 2 - 1, y + 19, _short(report, layer), "middle")}</g>'
        for first, last, layer in _recorded_together(report):
            y = top + _chunk(report, layer) * lane
            yield _box(_LEFT + first * step - 2, y - 3, (last - first + 1) * step, 36, "none", stroke="#222")

    return _svg(_LEFT + len(report.order) * step + 10, top + chunks * lane, "order of passes", parts())


def buffer_lives(report: CaptureReport) -> str:
    """Draw when static inputs are in use, in the order of passes; at most ``MOST_BUFFERS`` of them."""
    step, row = _step_width(report), 18
    shown = report.static_inputs[:MOST_BUFFERS]

    def parts() -> Iterator[str]:
        for line, buffer in enumerate(shown):
            y = 6 + line * row
            yield _text(_LEFT - 6, y + _TEXT, buffer.name[:16], "end")
            for use in buffer.uses:
                where = f"{_name(report, use.layer)}, micro-batch {use.micro_batch}"
                title = f"{buffer.name}, {in_bytes(buffer.bytes)}: {where}"
                x, width = _LEFT + use.first * step, (use.last - use.first + 1) * step - 2
                shade = "#66aabb" if use.micro_batch % 2 == 0 else "#aa88bb"
                yield _box(x, y + 2, width, row - 5, shade, title, "#ffffff")

    return _svg(_LEFT + len(report.order) * step + 10, len(shown) * row + 12, "static inputs in use", parts())


def _step_width(report: CaptureReport) -> float:
    return max(6.0, min(60.0, (_WIDTH - _LEFT - 20) / max(1, len(report.order))))


def _chunk(report: CaptureReport, layer: int | None) -> int:
    return 0 if layer is None else report.layers[layer].chunk


def _name(report: CaptureReport, layer: int | None) -> str:
    return "the whole model" if layer is None else report.layers[layer].name


def _short(report: CaptureReport, layer: int | None) -> str:
    number = re.search(r"\d+", _name(report, layer))
    return number[0] if number else "all"


def _recorded_together(report: CaptureReport) -> Iterator[tuple[int, int, int]]:
    """The first and the last step of each run of passes in one graph, and its layer."""
    for graph, places in groupby(enumerate(report.order), lambda place: _graph_of(report, *place[1])):
        if graph is not None:
            run = list(places)
            yield run[0][0], run[-1][0], graph[0]


def _graph_of(report: CaptureReport, layer: int | None, micro_batch: int, kind: str) -> tuple[int, int, str] | None:
    first = None if layer is None else report.layers[layer].recorded_with
    return None if first is None else (first, micro_batch, kind)
