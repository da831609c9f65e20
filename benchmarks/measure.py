"""Measures everything that documents quote, at one commit, into one folder; goes on where it stopped.

    python benchmarks/measure.py                     # what is not done at this commit on this machine's GPUs
    python benchmarks/measure.py --only step_time    # those whose names begin so
    python benchmarks/measure.py --list              # the parts, and at which commit each was measured
    python benchmarks/measure.py --stale             # files of results that are older than the code they are about

A part is one command of less than ten minutes, with one file in the folder, ``NAME_1gpu.json`` for one GPU. What it
prints goes to ``logs`` beside it, which is not for the repository. Where there is no git repository name the commit by
``--commit``. The exit code is 1 where a part failed; the others go on.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PRODUCT = ("megatron/core", "megatron/training")


@dataclass(frozen=True)
class Part:
    """A command that measures, and what it measures.

    Attributes:
        name: Its name, and that of its file.
        gpus: The numbers of GPUs that it is for.
        arguments: What Python is called with; ``GPUS`` and ``FILE`` are replaced.
        about: What of the repository the result depends on.
        seconds: How long it may take.
    """

    name: str
    gpus: tuple[int, ...]
    arguments: str
    about: tuple[str, ...] = PRODUCT
    seconds: int = 590

    def file(self, folder: Path, gpus: int) -> Path:
        """Return the file of its results."""
        return folder / f"{self.name}_{gpus}gpu.json"


_TIMES = "benchmarks/step_time.py --gpus GPUS --output FILE --no-profile --stall-seconds 120"
PARTS = (
    Part("step_time_a_b", (1, 2), f"{_TIMES} --configurations A B --variants eager native full_iteration --launches 2"),
    Part("step_time_a", (4,), f"{_TIMES} --configurations A --variants eager native full_iteration --launches 2"),
    Part(
        "step_time_a_b_optimizer",
        (1, 2),
        f"{_TIMES} --configurations A B --variants eager+optimizer native+optimizer full_iteration+optimizer",
    ),
    Part("step_time_c", (1, 2, 4), f"{_TIMES} --configurations C --variants eager native eager+grouped native+grouped"),
    Part("step_time_d", (1, 2), f"{_TIMES} --configurations D --variants eager native eager+grouped native+grouped"),
    Part("step_time_ddp", (2,), f"{_TIMES} --configurations A B --variants ddp ddp_graphs"),
    Part("scaling", (2,), "benchmarks/scaling.py --gpus GPUS --output FILE --no-profile"),
    Part("equality", (1,), "-m tests.support.on_one_gpu --output FILE"),
    Part("functional", (1, 2, 4), "tests/functional_tests/run.py --output FILE"),
    Part("demo", (1, 2), "examples/demo.py --json FILE"),
    Part("soak", (1,), "benchmarks/soak.py --ranks 1 --configurations dense grouped --steps 1000 --output FILE"),
    Part("soak", (2,), "benchmarks/soak.py --ranks 2 --configurations dense moe --steps 1000 --output FILE"),
    Part("grouped_experts", (1,), "benchmarks/grouped_experts.py --output FILE"),
    Part("replay_overhead", (1,), "benchmarks/replay_overhead.py --rounds 3 --repeats 50 --output FILE"),
    Part("capture_time", (1,), "benchmarks/capture_time.py --output FILE"),
    Part("local_graphs", (1,), "benchmarks/local_graphs.py --rounds 2 --output FILE"),
    Part("buffer_reuse", (2,), "benchmarks/buffer_reuse.py --output FILE"),
    Part(
        "rerun_agreement",
        (2,),
        "-m torch.distributed.run --nproc-per-node 2 benchmarks/rerun_agreement.py --output FILE",
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
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="parts whose names begin so")
    parser.add_argument("--commit", help="what is measured (default: what git says)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no part after so long")
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


def run(part: Part, file: Path, gpus: int, commit: str) -> bool:
    """Run ``part``, and note in its file what was measured; return whether it succeeded."""
    log = file.parent / "logs" / f"{file.stem}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    words = {"GPUS": str(gpus), "FILE": str(file)}
    command = [sys.executable, *(words.get(word, word) for word in shlex.split(part.arguments))]
    file.unlink(missing_ok=True)
    with log.open("w") as output:
        try:
            status = subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=part.seconds
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
    if file.exists():
        file.write_text(json.dumps(measured(file) | {"commit": commit, "exit": status}, indent=1) + "\n")
    return status == 0 and file.exists()


def stale(files: list[Path]) -> Iterator[tuple[Path, str, int]]:
    """Yield those of ``files`` whose code has changed since, with their commits and the number of changes.

    A file without a commit in it counts as measured when it was committed.
    """
    about = {part.name: part.about for part in PARTS}
    for file in files:
        name = file.stem.rpartition("_")[0]
        commit = str(measured(file).get("commit", "")).partition(",")[0].rstrip("+")
        if not git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
            commit = git("log", "-1", "--format=%h", "--", str(file))
        changes = git("rev-list", "--count", f"{commit}..HEAD", "--", *about.get(name, PRODUCT)) if commit else ""
        if changes != "0":
            yield file, commit or "not committed", int(changes or 0)


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
                print(
                    f"{part.name}, {gpus} GPUs: {measured(part.file(args.folder, gpus)).get('commit', 'not measured')}"
                )
        return 0
    import torch

    gpus, commit = args.gpus or torch.cuda.device_count(), args.commit or current_commit()
    parts = [part for part in PARTS if gpus in part.gpus and part.name.startswith(tuple(args.only))]
    start, failed = time.monotonic(), []
    for number, part in enumerate(parts, 1):
        file, begun = part.file(args.folder, gpus), time.monotonic()
        before = measured(file)
        if before.get("commit") == commit and before.get("exit") == 0:
            outcome = "done before"
        elif begun - start > args.seconds:
            outcome = "not begun"
        else:
            print(f"{number} of {len(parts)}: {part.name} ...", flush=True)
            outcome = "done" if run(part, file, gpus, commit) else "FAILED"
        if outcome == "FAILED":
            failed.append(part.name)
        print(f"{number} of {len(parts)}: {part.name}: {outcome}, {time.monotonic() - begun:.0f} s", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
