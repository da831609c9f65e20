"""A report as JSON, and as one HTML page that loads nothing else."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from html import escape
from pathlib import Path

from .drawings import ALLOCATED, CAPTURING, COLOURS, MOST_BUFFERS, RESERVED, buffer_lives, memory_chart, pass_lanes
from .record import KINDS, CaptureReport
from .table import hook_counts, in_bytes, number

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 2em 0 .3em; }
p { max-width: 75ch; margin: .4em 0; }
table { border-collapse: collapse; margin: .6em 0; } td, th { padding: .2em .8em .2em 0; text-align: left;
border-bottom: 1px solid #ddd; vertical-align: top; } td.n, th.n { text-align: right; }
.scroll { overflow-x: auto; border: 1px solid #e4e4e4; padding: .4em; } svg text { font-size: 12px; fill: #222; }
svg .on text { fill: #fff; } .key { display: inline-block; width: 1em; height: 1em; margin: 0 .3em 0 .8em;
vertical-align: -.15em; } .frame { border: 2px solid #222; }
"""
_ROUTES = {
    "forward_pre_hooks": "runs before the layer's forward pass, outside of its graph",
    "forward_hooks": "runs after the layer's forward pass, outside of its graph",
    "backward_pre_hooks": "runs before the layer's backward pass, outside of its graph",
    "backward_hooks": "runs after the layer's backward pass, outside of its graph",
    "withheld": "did not run during capture; not part of any graph",
    "recorded": "what it launched on the GPU is part of the graph",
}


def write(report: CaptureReport, folder: str, name: str) -> tuple[Path, Path]:
    """Write ``name.json`` and ``name.html`` to ``folder``, which is made if need be; return their paths.

    Raises:
        OSError: they cannot be written.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    data, html = target / f"{name}.json", target / f"{name}.html"
    data.write_text(json.dumps(asdict(report), indent=1) + "\n")
    html.write_text(page(report), encoding="utf-8")
    return data, html


def page(report: CaptureReport) -> str:
    """Return the page."""
    body = "\n".join(_body(report))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>CUDA graph capture</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _body(report: CaptureReport) -> Iterator[str]:
    what = "the whole model" if report.whole_model else f"{len(report.layers)} layers"
    yield "<h1>CUDA graph capture</h1>"
    yield _paragraph(
        "A CUDA graph is a recording of GPU work. After some ordinary training steps the passes of the model were run "
        "once more and recorded; training replays the recordings from then on, which saves the CPU the work of "
        "launching every kernel. This page shows what was recorded on rank 0, what it cost, and what is not recorded."
    )
    yield _paragraph(f"Recorded: {what}, by the {report.engine} engine.")
    yield _table(("", ""), _summary(report), numbers=(1,))
    yield "<h2>Memory over capture</h2>"
    chart = memory_chart(report.memory)
    if chart:
        yield _paragraph(
            "GPU memory from the beginning to the end. Reserved memory was taken from the device; allocated memory is "
            "the part that tensors occupy. What graphs need stays reserved for as long as they exist."
        )
        yield _legend((ALLOCATED, "allocated"), (RESERVED, "reserved"), (CAPTURING, "while graphs are captured"))
        yield f'<div class="scroll">{chart}</div>'
    else:
        yield _paragraph("The allocator reported no memory, as on a machine without a GPU.")
    yield "<h2>Order of passes</h2>"
    yield _paragraph(
        "Each box is one pass, from left to right in the order in which passes were captured and will be replayed: the "
        "number is the layer's. A lane is a chunk of the model, of which a pipeline stage has one or several. Point "
        "at a box for its layer, micro-batch, and time."
    )
    frame = '<span class="key frame"></span>passes that are recorded in one graph'
    there = {kind for _, _, kind in report.order}
    kinds = [(COLOURS[kind], kind.replace("_", " ")) for kind in KINDS if kind in there]
    yield _legend(*kinds, more=frame if any(layer.recorded_with is not None for layer in report.layers) else "")
    yield f'<div class="scroll">{pass_lanes(report)}</div>'
    if report.static_inputs:
        yield "<h2>Static inputs over their lives</h2>"
        yield _paragraph(
            "A replay reads its inputs from the same memory each time. Each row is such memory, and each bar one layer "
            "and micro-batch that uses it, from its forward pass to its last pass, over the same axis as above. "
            "Several bars in a row share the memory."
        )
        yield _legend(("#66aabb", "even micro-batch"), ("#aa88bb", "odd micro-batch"))
        yield f'<div class="scroll">{buffer_lives(report)}</div>'
        if len(report.static_inputs) > MOST_BUFFERS:
            yield _paragraph(f"{len(report.static_inputs) - MOST_BUFFERS} more are in the JSON file beside this page.")
    if report.layers:
        yield "<h2>Layers</h2>"
        yield _paragraph(
            "Number of graphs of each kind, and seconds of the CPU. In layers that are recorded together the first has "
            "the graphs."
        )
        header = ("layer", "chunk", "micro-batches", *(f"{_of(kind)} graphs" for kind in KINDS))
        header += ("recorded with", "warm-up s", "capture s")
        yield _table(header, _layer_rows(report), numbers=(1, 2, 3, 4, 5, 7, 8))
    if report.hooks:
        yield "<h2>Hooks</h2>"
        yield _paragraph(
            "Hooks are functions that run around a module, for example to gather its sharded parameters. Recording "
            "must leave some of them out of the graph."
        )
        yield _table(("hook", "where", "count", "during capture"), _hook_rows(report), numbers=(2,))
    yield "<h2>What stays eager</h2>"
    yield _paragraph("These parts run as without graphs.")
    yield _table(("part", "why"), [(part.what, part.why) for part in report.eager])


def _of(kind: str) -> str:
    return kind.replace("_gradients", "-gradient")


def _summary(report: CaptureReport) -> Iterator[tuple[str, str]]:
    for kind, count in report.graphs.items():
        yield f"{_of(kind)} graphs", number(count)
    if report.collectives:
        yield "graphs of collectives between GPUs alone", str(report.collectives)
    for name, seconds in report.seconds.items():
        yield _SECONDS[name], f"{seconds:.3f} s"
    if report.memory:
        before, after = report.memory[0], report.memory[-1]
        yield "allocated, before and after", f"{in_bytes(before.allocated)}, {in_bytes(after.allocated)}"
        yield "reserved, before and after", f"{in_bytes(before.reserved)}, {in_bytes(after.reserved)}"
    for pool in report.pools:
        yield f"memory pool of {pool.graphs} graphs", in_bytes(pool.bytes)
    uses = sum(len(buffer.uses) for buffer in report.static_inputs)
    if uses:
        size = in_bytes(sum(buffer.bytes for buffer in report.static_inputs))
        yield "static inputs, and how often layers use them", f"{len(report.static_inputs)} of {size}, {uses}"


_SECONDS = {
    "total": "time in all",
    "warm_up": "of it warm-up: the passes run without being recorded",
    "capture": "of it capture: the passes are recorded",
    "waiting": "of it waiting for other ranks",
}


def _layer_rows(report: CaptureReport) -> Iterator[tuple[str, ...]]:
    for layer in report.layers:
        yield (
            layer.name,
            str(layer.chunk),
            str(layer.micro_batches),
            *(number(layer.graphs[kind]) for kind in KINDS),
            "" if layer.recorded_with is None else report.layers[layer.recorded_with].name,
            f"{layer.warm_up_seconds:.3f}",
            f"{layer.capture_seconds:.3f}",
        )


def _hook_rows(report: CaptureReport) -> Iterator[tuple[str, ...]]:
    for (hook, route, on_layer), count in hook_counts(report).items():
        yield hook, "layers" if on_layer else "modules inside layers", str(count), _ROUTES[route]


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _legend(*entries: tuple[str, str], more: str = "") -> str:
    keys = (f'<span class="key" style="background:{colour}"></span>{escape(text)}' for colour, text in entries)
    return f"<p>{''.join(keys)}{more}</p>"


def _table(header: Iterable[str], rows: Iterable[tuple[str, ...]], numbers: Iterable[int] = ()) -> str:
    right = frozenset(numbers)

    def cells(tag: str, row: Iterable[str]) -> str:
        marked = ((' class="n"' if place in right else "", escape(cell)) for place, cell in enumerate(row))
        return "<tr>" + "".join(f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in marked) + "</tr>"

    return f"<table>{cells('th', header)}{''.join(cells('td', row) for row in rows)}</table>"
