"""Compare the step metrics of two runs in a table and a plot."""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """Metrics of one step; see step_metrics.py for meanings and units."""

    step: int
    loss: float
    grad_norm: float
    ms: float | None
    graphs: int


@dataclass(frozen=True)
class Run:
    """The steps of one training run, in order."""

    name: str
    steps: list[Step]

    @classmethod
    def read(cls, name: str, path: Path) -> "Run":
        """Read a run from the metrics file ``path``."""
        return cls(name, read_steps(path))

    @property
    def graphs(self) -> int:
        """Maximum number of graphs on the last rank in any step."""
        return max((step.graphs for step in self.steps), default=0)

    def median_ms(self) -> float:
        """Return the median milliseconds per step in the second half of the run, NaN without data."""
        times = [step.ms for step in self.steps[len(self.steps) // 2 :] if step.ms is not None]
        return statistics.median(times) if times else math.nan

    def capture_step(self) -> int | None:
        """Return the number of the first step with graphs, None if there is none."""
        return next((step.step for step in self.steps if step.graphs), None)


def read_steps(path: Path) -> list[Step]:
    """Read the complete lines of a metrics file, which may be growing or not exist yet."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [Step(**{name: record[name] for name in Step.__dataclass_fields__}) for record in records]


def same_bits(a: float, b: float) -> bool:
    """Return whether two numbers are finite and bit-identical, including the sign of zero."""
    return math.isfinite(a) and math.isfinite(b) and a.hex() == b.hex()


def equal(a: Step, b: Step) -> bool:
    """Return whether the losses and gradient norms of two steps are bit-identical."""
    return same_bits(a.loss, b.loss) and same_bits(a.grad_norm, b.grad_norm)


def failures(eager: Run, graphed: Run, steps: int) -> list[str]:
    """Return a message for each failed check, empty if all pass.

    Args:
        steps: Expected number of steps of each run.
    """
    found = [
        f"{run.name} has {len(run.steps)} steps, not {steps}" for run in (eager, graphed) if len(run.steps) != steps
    ]
    differing = [a.step for a, b in zip(eager.steps, graphed.steps, strict=False) if not equal(a, b)]
    if differing:
        found.append(f"loss or gradient norm differs in {len(differing)} steps, first in step {differing[0]}")
    if eager.graphs:
        found.append(f"{eager.name} captured {eager.graphs} graphs")
    if not graphed.graphs:
        found.append(f"{graphed.name} captured no graphs")
    return found


def summary(eager: Run, graphed: Run) -> dict[str, float]:
    """Return the number of bit-identical steps, the median times and the number of graphs."""
    return {
        "steps": max(len(eager.steps), len(graphed.steps)),
        "equal_steps": sum(equal(a, b) for a, b in zip(eager.steps, graphed.steps, strict=False)),
        "eager_ms": eager.median_ms(),
        "graphed_ms": graphed.median_ms(),
        "graphs": graphed.graphs,
    }


def table(eager: Run, graphed: Run) -> str:
    """Return a table of both runs' losses, gradient norms and times, followed by a summary."""
    rows = [f"{'':4} {'loss':^31} {'gradient norm':^31} {'ms per step':^19}"]
    names = f"{eager.name:>12} {graphed.name:>12}"
    rows.append(f"step {names} {'same':>5} {names} {'same':>5} {eager.name:>9} {graphed.name:>9}")
    captured = graphed.capture_step()
    for a, b in zip(eager.steps, graphed.steps, strict=False):
        cells = [f"{a.step:4d}"]
        for left, right in (a.loss, b.loss), (a.grad_norm, b.grad_norm):
            verdict = "yes" if same_bits(left, right) else "NO"
            cells.append(f"{left:12.8f} {right:12.8f} {verdict:>5}")
        cells.append(" ".join(f"{'-' if ms is None else f'{ms:.1f}':>9}" for ms in (a.ms, b.ms)))
        if b.step == captured:
            cells.append(" graphs captured before this step")
        rows.append(" ".join(cells))
    found = summary(eager, graphed)
    before, after = found["eager_ms"], found["graphed_ms"]
    ratio = f"{before / after:.2f} times as fast"
    rows += [
        "",
        f"bit-equal steps        {found['equal_steps']} of {found['steps']}",
        f"median ms per step     {eager.name} {before:.1f}, {graphed.name} {after:.1f} ({ratio})",
        f"graphs per rank        {eager.name} {eager.graphs}, {graphed.name} {graphed.graphs}",
    ]
    return "\n".join(rows)


def plot(eager: Run, graphed: Run, path: Path, title: str) -> None:
    """Write a PNG with the loss and the time of each step of both runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, (losses, times) = plt.subplots(2, 1, sharex=True, figsize=(8, 7), layout="constrained")
    figure.suptitle(title)
    for run, style, width in (eager, "-", 4), (graphed, "--", 1.5):
        numbers = [step.step for step in run.steps]
        losses.plot(numbers, [step.loss for step in run.steps], style, linewidth=width, label=run.name)
        timed = [step for step in run.steps if step.ms is not None]
        times.plot([step.step for step in timed], [step.ms for step in timed], style, marker="o", label=run.name)
    captured = graphed.capture_step()
    if captured is not None:
        for axes in losses, times:
            axes.axvline(captured, color="gray", linestyle=":", label="graphs captured before")
    losses.set_ylabel("loss")
    times.set_ylabel("ms per step")
    # The capture step may take many times as long as the others and would flatten them.
    highest = max(eager.median_ms(), graphed.median_ms())
    times.set_ylim(0, 3 * highest if highest > 0 else None)
    times.xaxis.set_major_locator(MaxNLocator(integer=True))
    times.set_xlabel("step")
    losses.legend()
    times.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
