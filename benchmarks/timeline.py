"""Draws a step's timeline from traces that ``step_time.py --logs`` saved: the host's CUDA calls, compute, collectives.

    python benchmarks/timeline.py out.png 'before=logs/B-eager.trace.json.gz' 'after=logs/B-native.trace.json.gz'

All steps are drawn at one scale. Needs matplotlib.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._step_time import cuda_trace  # noqa: E402
from benchmarks._step_time.step_profile import STEPS  # noqa: E402

HOST, COMPUTE, COLLECTIVES = LANES = ("host: CUDA calls", "GPU: compute", "GPU: NCCL")
WAITS, REPLAYS, CALLS = "waits for the GPU", "launches a graph", "other CUDA call"
COLORS = {WAITS: "#d62728", REPLAYS: "#9467bd", CALLS: "#1f77b4", COMPUTE: "#2ca02c", COLLECTIVES: "#ff7f0e"}
HAIRLINE = 0.3  # points around each bar: the shortest kernels would not be seen at all
Bars = dict[tuple[str, str], list[tuple[float, float]]]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments; ``traces`` are pairs of a title and a path.

    Raises:
        SystemExit: they are wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="a PNG file")
    parser.add_argument("traces", nargs="+", metavar="TITLE=TRACE")
    parser.add_argument("--steps", type=int, default=STEPS, help="how many steps a trace holds")
    parser.add_argument("--step", type=int, default=2, help="which of them to draw, from 1")
    args = parser.parse_args(arguments)
    if not 1 <= args.step <= args.steps:
        parser.error(f"--step must be between 1 and {args.steps}")
    if not all("=" in each for each in args.traces):
        parser.error("traces are given as TITLE=TRACE")
    # A path may hold an equals sign; a title may not.
    args.traces = [(title, Path(path)) for title, _, path in (each.partition("=") for each in args.traces)]
    return args


def one_step(events: Iterable[Mapping[str, Any]], *, steps: int, step: int) -> tuple[Bars, float]:
    """Return the bars of one step and its length.

    A trace has no mark between steps: it is divided into ``steps`` equal parts. Bars that reach into a part are cut.

    Args:
        events: Chrome trace events, ``ts`` and ``dur`` in microseconds.
        steps: How many steps they are.
        step: Which of them, from 1.

    Returns:
        Start and length, in milliseconds from the beginning of the step, by lane and kind; and the step's milliseconds.

    Raises:
        ValueError: there are no CUDA calls or GPU work.
    """
    placed = [(lane_and_kind(each), each["ts"], each["ts"] + each["dur"]) for each in events]
    known = [(where, start, stop) for where, start, stop in placed if where is not None]
    if not known:
        raise ValueError("the trace holds no CUDA calls and no GPU work")
    first, last = min(start for _, start, _ in known), max(stop for *_, stop in known)
    length = (last - first) / steps
    begin = first + (step - 1) * length
    bars: Bars = {}
    for where, start, stop in known:
        start, stop = max(start, begin), min(stop, begin + length)
        if start < stop:
            bars.setdefault(where, []).append(((start - begin) / 1000, (stop - start) / 1000))
    return bars, length / 1000


def lane_and_kind(event: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the lane that ``event`` belongs to and what it is there; None if it is not drawn."""
    category, name = event.get("cat"), event["name"]
    if category in cuda_trace.GPU:
        lane = COLLECTIVES if category == "kernel" and "nccl" in name.lower() else COMPUTE
        return lane, lane
    if category not in cuda_trace.API:
        return None
    if cuda_trace.waits(event):
        return HOST, WAITS
    return HOST, REPLAYS if re.match(r"cu(da)?GraphLaunch", name) else CALLS


def draw(path: Path, panels: Sequence[tuple[str, Bars, float]]) -> None:
    """Draw panels of a title, bars and a length in milliseconds, one below the other, to ``path``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    figure, axes = pyplot.subplots(len(panels), 1, squeeze=False, sharex=True, figsize=(11, 0.6 + 1.9 * len(panels)))
    for axis, (title, bars, length) in zip(axes[:, 0], panels, strict=True):
        for (lane, kind), each in bars.items():
            axis.broken_barh(each, (LANES[::-1].index(lane) - 0.4, 0.8), color=COLORS[kind], linewidth=HAIRLINE)
        axis.set_yticks(range(len(LANES)), LANES[::-1], fontsize=8)
        axis.set_ylim(-0.5, len(LANES) - 0.5)
        axis.axvline(length, color="black", linewidth=0.8)
        axis.set_title(f"{title}: {length:.1f} ms, profiled", fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlim(0, max(length for *_, length in panels) * 1.01)
    axes[-1, 0].set_xlabel("ms")
    handles = [patches.Patch(color=COLORS[kind], label=kind) for kind in (CALLS, REPLAYS, WAITS)]
    figure.legend(handles=handles, loc="upper right", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    """Draw what was asked for."""
    args = parse()
    panels = []
    for title, path in args.traces:
        bars, length = one_step(cuda_trace.read_events(path), steps=args.steps, step=args.step)
        panels.append((title, bars, length))
    draw(args.output, panels)


if __name__ == "__main__":
    main()
