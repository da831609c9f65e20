"""A bar for each variant's step, beside what its GPU computed, waited for collectives, and did nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot(path: Path, found: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> bool:
    """Draw the rows of each configuration to ``path``; return whether matplotlib is there to do it."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    names = [name for name, rows in found.items() if any("ms" in row for row in rows)]
    figure, axes = pyplot.subplots(len(names) or 1, 1, squeeze=False, figsize=(9, 1 + 3 * (len(names) or 1)))
    for name, axis in zip(names, axes[:, 0], strict=False):
        rows = [row for row in found[name] if "ms" in row][::-1]
        labels = [row["variant"] for row in rows]
        profiles = [row.get("profile", {}) for row in rows]
        compute = [each.get("compute_ms", 0.0) for each in profiles]
        nccl = [each.get("nccl_alone_ms", 0.0) for each in profiles]
        axis.barh(labels, [row["ms"] for row in rows], color="lightgray", label="step")
        axis.barh(labels, compute, height=0.4, color="tab:green", label="compute")
        axis.barh(labels, nccl, left=compute, height=0.4, color="tab:orange", label="NCCL alone")
        for label, row in zip(labels, rows, strict=True):
            axis.text(row["ms"], label, f" {row['ms']:.1f}", va="center", fontsize=8)
        axis.margins(x=0.1)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("ms a step")
    if names:
        axes[0, 0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
