"""Measured runs of dense models under Megatron-FSDP, read from results of ``step_time.py`` and ``scaling.py``."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks._step_time import configurations

from .step import ALL_LAYERS, EAGER, FULL_ITERATION, PER_LAYER
from .workload import Workload

ALL = "native::--cuda-graph-layers-per-graph=all"
MODES = {
    "eager": EAGER,
    "native::--cuda-graph-layers-per-graph=1": PER_LAYER,
    ALL: ALL_LAYERS,
    "native": ALL_LAYERS,  # in files without ``ALL``; in others it has graphs of the whole model
    "full_iteration": FULL_ITERATION,
}
SMALLEST = "B"  # of ``step_time.py``


@dataclass(frozen=True)
class Run:
    """A measured run.

    Attributes:
        host: The file, which stands for the host that its runs were on.
        hardware: What it was measured on, as the file says.
        name: Configuration or size, as reported.
        work: What was trained.
        mode: One of ``step.MODES``.
        ms: Milliseconds of a step.
        profile: Figures of its trace; empty where it has none.
    """

    host: str
    hardware: str
    name: str
    work: Workload
    mode: str
    ms: float
    profile: Mapping[str, Any]

    @property
    def is_smallest(self) -> bool:
        """Whether its model is ``SMALLEST``, with one micro-batch."""
        return self.work == workload(SMALLEST, self.work.ranks)


def workload(configuration: str, ranks: int) -> Workload:
    """Return the work of a dense configuration of ``step_time.py``, which may have further flags."""
    flags = configurations.configuration(configuration, ranks=ranks, steps=1, expert_parallel=1, on_cpu=False).flags
    values = {name: value for name, value in pairwise(flags) if name.startswith("--")}
    micro_batch = int(values["--micro-batch-size"])
    sequence = int(values["--seq-length"])
    return Workload(
        layers=int(values["--num-layers"]),
        hidden=int(values["--hidden-size"]),
        sequence=sequence,
        tokens=sequence * micro_batch,
        micro_batches=int(values["--global-batch-size"]) // micro_batch // ranks,
        ranks=ranks,
        vocabulary=int(values["--vocab-size"]),
    )


def read_runs(path: Path) -> list[Run]:
    """Return the runs in ``path`` that took a time and that the model describes: dense ones of ``MODES``.

    Raises:
        ValueError: they were not on GPUs.
    """
    found = json.loads(path.read_text())
    gpus = re.match(r"(\d+) x ", found["hardware"])
    if gpus is None:
        raise ValueError(f"{path}: was measured on {found['hardware']}, whose times mean nothing")
    runs = []
    rows = list(_rows(found, int(gpus[1])))
    modes = dict(MODES)
    if any(row["variant"] == ALL for *_, row in rows):
        del modes["native"]
    for configuration, name, row in rows:
        if row["variant"] in modes and "ms" in row:
            work = workload(configuration, int(gpus[1]))
            runs.append(
                Run(path.stem, found["hardware"], name, work, modes[row["variant"]], row["ms"], row.get("profile", {}))
            )
    return runs


def _rows(found: Mapping[str, Any], ranks: int) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for name, rows in found.get("configurations", {}).items():
        if name.partition(":")[0] not in configurations.MODULES:
            yield from ((name, name, row) for row in rows)
    for row in found.get("models", []):
        layers, many = row["layers"], row["micro_batches"]
        flags = f"--num-layers {layers} --global-batch-size {many * ranks}"
        yield f"{SMALLEST}:{flags}", f"{layers} layers, {many} micro-batches", row
