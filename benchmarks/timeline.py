"""Draw one step of several traces on one time scale as an SVG.

    python benchmarks/step_time.py --train B eager native --profile --logs LOGS
    python benchmarks/timeline.py docs/images/step_timeline.svg "eager=LOGS/EAGER.trace.json.gz" "graphs=LOGS/..."

Each trace holds ``step_profile.STEPS`` steps. The second one is drawn in three lanes: CUDA API calls of the host, GPU
kernels other than NCCL's, and NCCL kernels.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._step_time.cuda_trace import API, GPU, is_collective, read_events  # noqa: E402
from benchmarks._step_time.step_profile import STEPS  # noqa: E402

LANES = {"host": "#8a8f98", "compute": "#3b7dd8", "collectives": "#e08a2c"}
WIDTH, MARGIN, LANE, GAP = 960, 110, 18, 26  # pixels

type Blocks = dict[str, list[tuple[float, float]]]  # start and end of each block in ms, by lane


def blocks(events: Iterable[dict[str, Any]], pixel: float = 0.05) -> Blocks:
    """Return the busy intervals of each lane in the second step; merge intervals less than ``pixel`` apart.

    Args:
        events: Chrome trace events, ``ts`` and ``dur`` in microseconds.
        pixel: Resolution, in milliseconds.
    """
    spans: list[tuple[float, float, str]] = []
    for event in events:
        category = event.get("cat")
        if category in API or category in GPU:
            lane = "host" if category in API else "collectives" if is_collective(event) else "compute"
            spans.append((event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000, lane))
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    step = (last - first) / STEPS
    found: Blocks = {lane: [] for lane in LANES}
    for start, end, lane in sorted(spans):
        start, end = (min(max(time - first - step, 0.0), step) for time in (start, end))
        own = found[lane]
        if start < end:
            if own and start - own[-1][1] < pixel:
                own[-1] = own[-1][0], max(end, own[-1][1])
            else:
                own.append((start, end))
    return found


def drawing(traces: Sequence[tuple[str, Blocks]]) -> str:
    """Return an SVG with the named traces stacked vertically."""
    longest = max(end for _, each in traces for own in each.values() for _, end in own)
    scale = (WIDTH - MARGIN - 10) / longest
    lines, top = [], 10
    for name, each in traces:
        step = max(end for own in each.values() for _, end in own)
        lines.append(f'<text x="0" y="{top + 12}" font-weight="bold">{name}: {step:.1f} ms</text>')
        top += 20
        for lane, color in LANES.items():
            lines.append(f'<text x="0" y="{top + 13}">{lane}</text>')
            lines.append(f'<rect x="{MARGIN}" y="{top}" width="{step * scale:.1f}" height="{LANE}" fill="#eef0f3"/>')
            path = "".join(
                f"M{MARGIN + start * scale:.1f} {top}h{max((end - start) * scale, 0.3):.1f}v{LANE}H"
                f"{MARGIN + start * scale:.1f}z"
                for start, end in each[lane]
            )
            lines.append(f'<path d="{path}" fill="{color}"/>')
            top += LANE + 3
        top += GAP - 3
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *lines, "</svg>", ""])


def main() -> None:
    """Draw the traces given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="path of the SVG file")
    parser.add_argument("traces", nargs="+", metavar="NAME=TRACE")
    args = parser.parse_args()
    named = (text.split("=", 1) for text in args.traces)
    args.output.write_text(drawing([(name, blocks(read_events(Path(path)))) for name, path in named]))


if __name__ == "__main__":
    main()
