"""Report of one CUDA graph capture: progress, a table for the log, a JSON file and an HTML page."""

import json
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

import torch

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

KINDS = ("forward", "backward", "weight_gradients")
_PASSES = ("forward", "backward")
_LOG_INTERVAL = 30.0  # seconds


@dataclass(frozen=True)
class Memory:
    """GPU memory in bytes when a phase of the capture begins: allocated to tensors, reserved from the device."""

    phase: str
    allocated: int
    reserved: int


@dataclass(frozen=True)
class Pool:
    """A memory pool: the number of graphs in it and its size in bytes."""

    graphs: int
    bytes: int


@dataclass(frozen=True)
class Captured:
    """Graphs of one layer, of several layers in one graph, of a model chunk, or of the whole model.

    Attributes:
        names: The layers, in order, or the name of the chunk or model.
        micro_batches: The number of micro-batches that have graphs of their own.
        graphs: The number of graphs of each kind in ``KINDS``.
        warm_up_seconds: Host time of warm-up passes.
        capture_seconds: Host time of captured passes.
    """

    names: Sequence[str]
    micro_batches: int
    graphs: dict[str, int]
    warm_up_seconds: float
    capture_seconds: float


@dataclass(frozen=True)
class Eager:
    """A part of the model or a kind of call that has no graphs, and the reason."""

    what: str
    why: str


@dataclass(frozen=True)
class CaptureReport:
    """The outcome of one capture on this rank.

    Attributes:
        whole_model: Whether the graphs hold the whole model.
        captured: All graphs of passes.
        collectives: The number of additional graphs that hold only collectives.
        seconds: Host seconds: ``total``, ``warm_up``, ``capture``, and ``waiting`` for other ranks.
        memory: One sample per phase.
        pools: The memory pools of the graphs.
        eager: What runs eagerly.
    """

    whole_model: bool
    captured: Sequence[Captured]
    collectives: int
    seconds: dict[str, float]
    memory: Sequence[Memory]
    pools: Sequence[Pool]
    eager: Sequence[Eager]

    def table(self) -> str:
        """Return the report as lines of text."""
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["CUDA graphs, rank 0:"]
        for what, *cells in rows:
            lines.append("  ".join([what.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]))
        lines += self._notes()
        if any(sample.reserved for sample in self.memory):
            before, after = self.memory[0], self.memory[-1]
            change = f"allocated {in_mib(before.allocated)} -> {in_mib(after.allocated)}"
            lines.append(f"memory {change}, reserved {in_mib(before.reserved)} -> {in_mib(after.reserved)}")
        for why, parts in groupby(self.eager, lambda part: part.why):
            lines.append(f"eager: {', '.join(part.what for part in parts)}, because {why}")
        return "\n  ".join(lines)

    def page(self) -> str:
        """Return the report as an HTML page that loads no other file."""
        header, *captured = self._rows()
        most = max([1, *(sample.reserved for sample in self.memory)])
        memory = []
        for sample in self.memory:
            bars = (f'<meter max="{most}" value="{size}"></meter>' for size in (sample.allocated, sample.reserved))
            cells = zip((sample.allocated, sample.reserved), bars, strict=True)
            memory.append([escape(sample.phase), *(f"{bar} {in_mib(size)}" for size, bar in cells)])
        template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        return Template(template).substitute(
            header=_table_row(map(escape, header), "th"),
            captured="\n".join(_table_row(map(escape, row)) for row in captured),
            notes="\n".join(f"<li>{escape(note)}</li>" for note in self._notes()),
            memory="\n".join(map(_table_row, memory)),
            eager="\n".join(_table_row((escape(part.what), escape(part.why))) for part in self.eager),
        )

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write ``name.json`` and ``name.html`` to ``folder``, which is created if missing, and return their paths.

        Raises:
            OSError: A file cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        files = {f"{name}.json": json.dumps(asdict(self), indent=1) + "\n", f"{name}.html": self.page()}
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        return [folder / file for file in files]

    def _rows(self) -> list[tuple[str, ...]]:
        """Return the header and one row for each run of layers with equal graphs."""
        rows = [("graphs", *(kind.replace("_", " ") for kind in KINDS), "warm-up s", "capture s")]
        for _, run in groupby(self.captured, lambda part: (len(part.names), part.graphs)):
            parts = list(run)
            names = [name for part in parts for name in part.names]
            what = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            rows.append(_numbers(f"{what}, in one graph" if len(parts[0].names) > 1 else what, parts))
        if len(rows) > 2:
            rows.append(_numbers("all", self.captured))
        return rows

    def _notes(self) -> Iterator[str]:
        seconds = self.seconds
        yield f"{seconds['total']:.2f} s in total, {seconds['waiting']:.2f} s of them waiting for other ranks"
        if self.collectives:
            yield f"{self.collectives} more graphs hold only collectives"
        for pool in self.pools:
            yield f"a memory pool of {in_mib(pool.bytes)} holds {pool.graphs} graphs"


class CaptureRecorder:
    """Records times and memory of one capture and shows its progress; does nothing unless ``active``.

    A pass ends when the next one begins. Times are the host's: in warm-up the device may lag behind.

    Attributes:
        active: The argument.
        seconds: Host seconds by name and phase (``warm-up`` or ``capture``).
        waited: Seconds this rank waited for others.
        memory: One sample per phase.
    """

    def __init__(self, active: bool):
        self.active = active
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.waited = 0.0
        self.memory: list[Memory] = []
        self._started = self._last_line = time.perf_counter()
        self._passes: int | None = None
        self._warm_up_passes = self._begun = 0
        self._open: tuple[str, str] | None = None
        self._since = 0.0
        self._bar: Any = None

    @classmethod
    def of_rank_0(cls) -> "CaptureRecorder":
        """Return a recorder that is active on rank 0."""
        return cls(not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0)

    @property
    def total(self) -> float:
        """Seconds since the recorder was created."""
        return time.perf_counter() - self._started

    def sample(self, phase: str) -> None:
        """Record memory at the start of ``phase``."""
        if self.active:
            self.memory.append(Memory(phase, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))

    def expect(self, passes: int, warmup_iters: int) -> None:
        """Set the number of passes of one iteration, and of warm-up iterations before the captured one.

        Not called if passes begin while the stream captures, which tells the phases apart.
        """
        self._warm_up_passes, self._passes, self._begun = passes * warmup_iters, passes * (warmup_iters + 1), 0

    def begin(self, name: str, phase: str = "") -> None:
        """Record that a pass of ``name`` begins if ``phase`` is ``forward`` or ``backward``, else only end the last."""
        if not self.active:
            return
        self._end_pass()
        if phase not in _PASSES:
            return
        capturing = torch.cuda.is_current_stream_capturing()
        captured = capturing if self._passes is None else self._begun >= self._warm_up_passes
        kind = "capture" if captured else "warm-up"
        if not self.memory or self.memory[-1].phase != kind:
            self.sample(kind)
        self._begun += 1
        self._show(f"{name}, {phase} {kind}")
        self._open, self._since = (name, kind), time.perf_counter()

    def wait(self, wait: Callable[[], object]) -> None:
        """Call ``wait``, which waits for other ranks, and count its time for no pass."""
        before = time.perf_counter()
        wait()
        waited = time.perf_counter() - before
        self.waited += waited
        self._since += waited

    def end(self) -> None:
        """Record that no other pass follows, and close the progress bar."""
        if self._open is not None:
            self._end_pass()
            self.sample("captured")
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _end_pass(self) -> None:
        if self._open is not None:
            self.seconds[self._open] += time.perf_counter() - self._since
            self._open = None

    def _show(self, what: str) -> None:
        """Show the pass that begins: in a progress bar on a terminal with ``tqdm``, else every 30 s in the log."""
        if self._begun == 1:
            self._bar = _bar(self._passes)
        if self._bar is not None:
            self._bar.set_postfix_str(what, refresh=False)
            self._bar.update(int(self._begun > 1))
        elif time.perf_counter() - self._last_line > _LOG_INTERVAL:
            self._last_line = time.perf_counter()
            total = "" if self._passes is None else f" of {self._passes}"
            logger.info(f"CUDA graph capture: pass {self._begun}{total}, {what}")


def in_mib(size: int) -> str:
    """Format a number of bytes."""
    return f"{size / 2**10:,.1f} KiB" if 0 < size < 2**20 else f"{size / 2**20:,.1f} MiB"


def _bar(total: int | None) -> Any | None:
    if sys.stderr is None or getattr(sys.stderr, "closed", False) or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc="CUDA graphs", unit="pass", leave=False)


def _numbers(what: str, parts: Sequence[Captured]) -> tuple[str, ...]:
    counts = (str(sum(part.graphs[kind] for part in parts)) for kind in KINDS)
    warm_up, capture = sum(part.warm_up_seconds for part in parts), sum(part.capture_seconds for part in parts)
    return what, *counts, f"{warm_up:.3f}", f"{capture:.3f}"


def _table_row(cells: Any, tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"
