"""Measures everything that documents quote, at one commit, into one folder; goes on where it stopped.

    python benchmarks/measure.py                     # what is not done at this commit on this machine's GPUs
    python benchmarks/measure.py --only 'step_time*' # those of these names
    python benchmarks/measure.py --gpus 2 --at-once 2  # those for two GPUs, on a host with four
    python benchmarks/measure.py --list              # the parts, and at which commit each was measured
    python benchmarks/measure.py --stale             # files of results that are older than the code they are about

A part is one command of less than ten minutes, with one file in the folder, ``NAME_1gpu.json`` for one GPU. What it
prints goes to ``logs`` beside it, which is not for the repository. Where there is no git repository name the commit by
``--commit``. The exit code is 1 where a part failed; the others go on.
"""

import argparse
import json
import math
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.results_file import write_json  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PRODUCT = ("megatron/core", "megatron/training")
LONGEST = 590.0  # seconds of a part: one command of ten minutes
GRACE = 10  # seconds in which processes end by themselves
FAILED = "FAILED"
RUNNING: set[subprocess.Popen] = set()


@dataclass(frozen=True)
class Part:
    """A command that measures, and what it measures.

    Attributes:
        name: Its name, and that of its file.
        gpus: The numbers of GPUs that it is for; 0 for a machine that has none.
        arguments: What Python is called with; ``GPUS``, ``FILE``, ``LAUNCHES`` and ``SECONDS``, which it has, are
            replaced.
        seconds: About how long it takes on one H100; with more GPUs somewhat longer.
    """

    name: str
    gpus: tuple[int, ...]
    arguments: str
    seconds: int = 300

    def file(self, folder: Path, gpus: int) -> Path:
        """Return the file of its results."""
        return folder / f"{self.name}_{gpus}gpu.json"


_TIMES = "benchmarks/step_time.py --gpus GPUS --output FILE --stall-seconds 120 --no-profile"
_EQUALITY = "-m tests.support.trainings.on_gpus --processes 15 --seconds SECONDS --output FILE"
_ON_FOUR_ONLY = "'two instances' 'TP2 with sequence parallelism' 'EP2 with ETP2' 'EP of all' PP2 'PP2 with VPP2'"
_GROUPED = "eager native eager+grouped native+grouped"
_DENSE = "eager native full_iteration compute_alone"
_CHECKED = "eager+checks native+checks"
_UNTIED = "--untie-embeddings-and-output-weights"
_FULL = "--recompute-granularity full --recompute-method"
_RECOMPUTED = (
    f"A:{_FULL} uniform --recompute-num-layers 1",
    f"A:{_FULL} block --recompute-num-layers 8",
    "A:--recompute-granularity selective --recompute-modules layernorm core_attn",
)
_FP8 = "A:--fp8-format hybrid --fp8-recipe"
_KINDS = (
    f"{_FP8} delayed",
    f"{_FP8} tensorwise",
    "A:--mtp-num-layers 1",
    "A:--num-layers 8 --hybrid-layer-pattern *-*-*-*-*-*-*-*-",
)
_BY_COPY_ENGINES = "NCCL_CTA_POLICY=2:--use-nccl-ub"  # all-gathers
_SHARDED = (*_DENSE.split(), f"native:{_BY_COPY_ENGINES}", f"full_iteration:{_BY_COPY_ENGINES}")
_FUSED = "eager+fused native+fused full_iteration+fused"
# Gradients are divided by the number of ranks within the collective, not by a kernel before it.
_AVERAGED = "--ddp-average-in-collective"
# What makes dense steps on several GPUs shorter, alone and together; its flags are for full iterations as well.
_LEVERS = (
    *("native", f"native:{_BY_COPY_ENGINES} {_AVERAGED}", "full_iteration", "compute_alone", "compute_alone+fused"),
    *(*_FUSED.split(), f"native+fused::{_AVERAGED}", f"native+fused:{_BY_COPY_ENGINES}"),
    *(f"{name}+fused:{_BY_COPY_ENGINES} {_AVERAGED}" for name in ("native", "full_iteration")),
)
_ON_FOUR = (
    *(*_DENSE.split(), "compute_alone+fused", "full_iteration+optimizer", "native+optimizer"),
    *(f"{name}:{_BY_COPY_ENGINES} {_AVERAGED}" for name in ("native+fused", "full_iteration+fused")),
    f"native+fused+optimizer:{_BY_COPY_ENGINES} {_AVERAGED}",
)
_OPTIMIZER = "full_iteration full_iteration+optimizer eager+optimizer native+optimizer"
_OPTIMIZER_LEVERS = (
    *_OPTIMIZER.split(),
    *("eager+fused+optimizer", f"native+fused+optimizer:{_BY_COPY_ENGINES} {_AVERAGED}"),
)
# How experts of other ranks get their tokens; then with what makes dense steps shorter.
_EXCHANGED = (
    *("eager+grouped", "native+grouped", "native+grouped::--moe-alltoall-capacity-factor 1.5"),
    *("native+grouped::--moe-token-dispatcher-type allgather", "eager+grouped+fused"),
    f"native+grouped+fused:{_BY_COPY_ENGINES} {_AVERAGED}",
)
# What documents quote most comes first.
PARTS = (
    Part("step_time_a_b", (1,), f"{_TIMES} --configurations A B --variants {_DENSE} --launches LAUNCHES", 240),
    Part(
        "step_time_a_b",
        (2,),
        f"{_TIMES} --configurations A B --variants {shlex.join(_SHARDED)} --launches LAUNCHES",
        390,
    ),
    Part(
        "step_time_kinds",
        (1,),
        f"{_TIMES} --configurations {shlex.join(_KINDS)} --variants eager native full_iteration",
        180,
    ),
    Part(
        "step_time_fp8_parameters",
        (1,),
        f"{_TIMES} --configurations '{_FP8} delayed --fp8-param-gather' --variants eager native full_iteration",
        80,
    ),
    Part("step_time_checked", (1,), f"{_TIMES} --configurations A B --variants {_CHECKED}", 80),
    Part("step_time_levers", (2,), f"{_TIMES} --configurations A B --variants {shlex.join(_LEVERS)}", 300),
    Part("step_time_a", (4,), f"{_TIMES} --configurations A --variants {shlex.join(_ON_FOUR)}", 180),
    Part("step_time_c_d", (1, 2), f"{_TIMES} --configurations C D --variants {_GROUPED}", 180),
    Part("step_time_exchange", (2,), f"{_TIMES} --configurations C --variants {shlex.join(_EXCHANGED)}", 120),
    Part(
        "step_time_c",
        (4,),
        f"{_TIMES} --configurations C --variants {shlex.join(_EXCHANGED)} --expert-parallel 4",
        120,
    ),
    Part("replay_overhead", (1,), "benchmarks/replay_overhead.py --rounds 3 --repeats 50 --output FILE", 40),
    Part("capture_time", (1,), "benchmarks/capture_time.py --output FILE", 50),
    Part("demo", (1, 2), "examples/demo.py --json FILE", 80),
    Part("step_time_a_b_optimizer", (1,), f"{_TIMES} --configurations A B --variants {_OPTIMIZER}", 150),
    Part(
        "step_time_a_b_optimizer",
        (2,),
        f"{_TIMES} --configurations A B --variants {shlex.join(_OPTIMIZER_LEVERS)}",
        180,
    ),
    Part("equality", (1,), f"{_EQUALITY}", 450),
    *(Part(f"equality_{part}", (2, 4), f"{_EQUALITY} --share {part}/2", 450) for part in (1, 2)),
    # What two GPUs cannot have: shards in each of several instances, experts or tensors of ranks that others repeat.
    Part("equality_layouts", (4,), f"{_EQUALITY} --layouts {_ON_FOUR_ONLY}", 200),
    Part(
        "soak",
        (1,),
        "benchmarks/soak.py --ranks 1 --configurations dense grouped --steps 1000 --at-once 4 --output FILE",
        200,
    ),
    Part("soak", (2,), "benchmarks/soak.py --ranks 2 --configurations dense moe --steps 1000 --output FILE", 500),
    Part(
        "step_time_fsdp2",
        (2,),
        f"{_TIMES} --configurations 'A:{_UNTIED}' 'B:{_UNTIED}' --variants eager native fsdp2 fsdp2_graphs",
        150,
    ),
    Part(
        "recomputation",
        (1,),
        f"{_TIMES} --steps 20 --configurations {shlex.join(_RECOMPUTED)} --variants eager native full_iteration",
        120,
    ),
    Part("scaling", (2,), "benchmarks/scaling.py --gpus GPUS --output FILE --no-profile", 300),
    Part("functional", (2, 4), "tests/functional_tests/run.py --output FILE", 460),
    Part("local_graphs", (1,), "benchmarks/local_graphs.py --rounds 2 --output FILE", 200),
    Part(
        "local_graphs_te",
        (1,),
        "benchmarks/local_graphs.py --rounds 2 --transformer-engine --output FILE",
        240,
    ),
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments.

    Raises:
        SystemExit: they are wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=RESULTS / "release", help="where results go")
    parser.add_argument("--gpus", type=int, help="take the parts for so many GPUs (default: those of this machine)")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="parts of these names; * is any text")
    parser.add_argument("--at-once", type=int, default=1, help="parts at a time, each on GPUs of its own (default: 1)")
    parser.add_argument("--commit", help="what is measured (default: what git says)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="how long all may take; no part is begun that takes longer than what is left",
    )
    parser.add_argument("--launches", type=int, default=2, help="of dense models, whose times are medians over them")
    parser.add_argument("--list", action="store_true", help="measure nothing: list the parts")
    parser.add_argument("--stale", action="store_true", help="measure nothing: list results older than their code")
    return parser.parse_args(arguments)


def git(*arguments: str) -> str:
    """Return what git prints in this repository; empty where it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def current_commit() -> str:
    """Return the commit of this repository, with ``+`` if files differ from it.

    Raises:
        SystemExit: there is no repository.
    """
    commit = git("rev-parse", "--short=10", "HEAD")
    if not commit:
        raise SystemExit("there is no git repository here: name what is measured by --commit")
    return commit + ("+" if git("status", "--porcelain", "--", *PRODUCT) else "")


def measured(file: Path) -> dict[str, Any]:
    """Return what is in a file of results; nothing where there is none."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def run(part: Part, file: Path, noted: dict[str, Any], seconds: float, visible: str | None, **words: int) -> bool:
    """Run ``part`` for at most ``seconds``, note in its file what was measured, and return whether it succeeded.

    Args:
        part: The part.
        file: Its file.
        noted: What is noted beside.
        seconds: How long it may take.
        visible: Its GPUs, as ``CUDA_VISIBLE_DEVICES``; None for all.
        words: What is replaced in its arguments beside ``FILE`` and ``SECONDS``.
    """
    log = file.parent / "logs" / f"{file.stem}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    replaced = {"FILE": file, "SECONDS": int(seconds), **words}
    command = [sys.executable, *(str(replaced.get(word, word)) for word in shlex.split(part.arguments))]
    environment = os.environ | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    file.unlink(missing_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        RUNNING.add(process)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            end(process)
            RUNNING.discard(process)
    if file.exists():
        found = measured(file) | noted | {"exit": status}
        found.pop("numbers", None)  # of each step: they are compared already
        write_json(file, found)
    return status == 0 and file.exists()


def end(process: subprocess.Popen) -> None:
    """End ``process``, the first of its session, and what it started, which would keep the GPUs from the next part."""

    def send(number: int) -> bool:
        process.poll()
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return False
        return True

    if send(signal.SIGTERM):
        until = time.monotonic() + GRACE
        while send(0) and time.monotonic() < until:
            time.sleep(0.1)
        send(signal.SIGKILL)
    process.wait()


def stale(files: list[Path]) -> Iterator[tuple[Path, str, int]]:
    """Yield those of ``files`` whose code has changed since, with their commits and the number of changes.

    A file without a commit in it counts as measured when it was committed.
    """
    for file in files:
        named = re.search(r"\b[0-9a-f]{7,}\b", str(measured(file).get("commit", "")))
        commit = named[0] if named else ""
        if not commit or not git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
            commit = git("log", "-1", "--format=%h", "--", str(file))
        changes = git("rev-list", "--count", f"{commit}..HEAD", "--", *PRODUCT) if commit else ""
        if changes != "0":
            yield file, commit or "not committed", int(changes or 0)


def sets_of_gpus(sets: int, gpus: int) -> list[str | None]:
    """Return the GPUs of each of so many sets, as ``CUDA_VISIBLE_DEVICES``; None for one set, which has what there is.

    Raises:
        SystemExit: there are not so many GPUs.
    """
    if sets == 1:
        return [None]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else [str(index) for index in range(torch.cuda.device_count())]
    if sets < 1 or sets * gpus > len(visible):
        raise SystemExit(f"--at-once: {sets} parts for {gpus} GPUs each do not fit a machine with {len(visible)}")
    return [",".join(visible[first : first + gpus]) for first in range(0, sets * gpus, gpus)]


def main() -> int:
    """Measure, or list."""
    args = parse()
    if args.stale:
        for file, commit, changes in stale(sorted(RESULTS.rglob("*.json"))):
            print(f"{file.relative_to(RESULTS)}: {changes} commits after {commit}")
        return 0
    if args.list:
        for part in PARTS:
            for gpus in part.gpus:
                commit = measured(part.file(args.folder, gpus)).get("commit", "not measured")
                print(f"{part.name}, {gpus} GPUs, about {part.seconds} s: {commit}")
        return 0
    gpus, commit = args.gpus or torch.cuda.device_count(), args.commit or current_commit()
    parts = [part for part in PARTS if gpus in part.gpus and any(fnmatch(part.name, name) for name in args.only)]
    noted = {"commit": commit} | ({"at_once": args.at_once} if args.at_once > 1 else {})
    idle: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for visible in sets_of_gpus(args.at_once, gpus):
        idle.put(visible)
    end_of_all = time.monotonic() + args.seconds

    def attempt(number: int, part: Part) -> str:
        own, file, begun = idle.get(), part.file(args.folder, gpus), time.monotonic()
        before, left = measured(file), end_of_all - begun
        if before.get("commit") == commit and before.get("exit") == 0:
            outcome = "done before"
        elif part.seconds > left:
            outcome = f"not begun: takes about {part.seconds} s"
        else:
            print(f"{number} of {len(parts)}: {part.name}: about {part.seconds} s ...", flush=True)
            options = {"GPUS": gpus, "LAUNCHES": args.launches}
            outcome = "done" if run(part, file, noted, min(left, LONGEST), own, **options) else FAILED
        idle.put(own)
        print(f"{number} of {len(parts)}: {part.name}: {outcome}, {time.monotonic() - begun:.0f} s", flush=True)
        return outcome

    with ThreadPoolExecutor(args.at_once) as pool:
        try:
            outcomes = [*pool.map(attempt, range(1, len(parts) + 1), parts)]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [*RUNNING]:
                end(process)
            raise
    return int(FAILED in outcomes)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    sys.exit(main())
