"""Measure all documented figures at one commit, and write them to one folder. Later calls skip finished parts.

    python benchmarks/measure.py                       # all parts for the GPUs of this machine
    python benchmarks/measure.py --only 'step_time*'   # parts with matching names
    python benchmarks/measure.py --list                # parts, and the commit of their results

A part is one command of less than ten minutes. It writes one file, for example ``NAME_1gpu.json`` for one GPU. Its
output goes to ``logs`` in the same folder, which is not committed. Without a git repository, pass ``--commit``. If a
part fails, the others still run, and the exit code is 1.
"""

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
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
LONGEST = 590.0  # time limit of a part in seconds
GRACE = 10  # seconds from SIGTERM to SIGKILL


@dataclass(frozen=True)
class Part:
    """A measurement command.

    Attributes:
        name: Name of the part and prefix of its file.
        gpus: Numbers of GPUs, with one run for each.
        arguments: Command line after ``python``, with placeholders ``GPUS``, ``FILE``, ``LAUNCHES`` and ``SECONDS``.
        seconds: Approximate time on one H100; slightly longer on more GPUs.
    """

    name: str
    gpus: tuple[int, ...]
    arguments: str
    seconds: int = 300

    def file(self, folder: Path, gpus: int) -> Path:
        """Return the file for the results."""
        return folder / f"{self.name}_{gpus}gpu.json"


_TIMES = "benchmarks/step_time.py --gpus GPUS --output FILE --stall-seconds 120 --no-profile"
_EQUALITY = "-m tests.support.trainings.on_gpus --seconds SECONDS --output FILE"
_ON_FOUR_ONLY = "'two instances' 'TP2 with sequence parallelism' 'EP2 with ETP2' 'EP of all' PP2 'PP2 with VPP2'"
_GROUPED = "eager native eager+grouped native+grouped full_iteration+grouped"
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
# Averages gradients in the collective instead of a separate kernel.
_AVERAGED = "--ddp-average-in-collective"
# Settings that speed up dense models on several GPUs, alone and combined; also valid for full iterations.
_LEVERS = (
    *("native", f"native:{_BY_COPY_ENGINES} {_AVERAGED}", "full_iteration", "compute_alone", "compute_alone+fused"),
    *(*_FUSED.split(), f"native+fused::{_AVERAGED}", f"native+fused:{_BY_COPY_ENGINES}"),
    *(f"{name}+fused:{_BY_COPY_ENGINES} {_AVERAGED}" for name in ("native", "full_iteration")),
)
_ON_FOUR = (
    *(*_DENSE.split(), "compute_alone+fused"),
    *(f"{name}:{_BY_COPY_ENGINES} {_AVERAGED}" for name in ("native+fused", "full_iteration+fused")),
)
# Each kind of graph that holds dropless experts.
_KINDS_OF_GRAPHS = (
    *("eager+grouped", "native+grouped", "full_iteration+grouped", "ddp+grouped", "ddp_graphs+grouped"),
    *(f"ddp+grouped::--cuda-graph-impl {name}" for name in ("full_iteration", "local")),
)
# Token dispatchers; the last rows add settings that speed up dense models.
_EXCHANGED = (
    *("eager+grouped", "native+grouped", "native+grouped::--moe-alltoall-capacity-factor 1.5"),
    *("native+grouped::--moe-token-dispatcher-type allgather", "eager+grouped+fused"),
    f"native+grouped+fused:{_BY_COPY_ENGINES} {_AVERAGED}",
)
# Models of released sizes, which need the memory of an H200
_SIZED = f"{_TIMES} --steps 20"
_COLLECTIVES = f"native+fused:{_BY_COPY_ENGINES} {_AVERAGED}"
_LLAMA = (*_DENSE.split(), _COLLECTIVES, "compute_alone+fused")
_QWEN_EP1 = (
    *("eager+grouped", "native+grouped", "compute_alone+grouped", "compute_alone+grouped+fused"),
    _COLLECTIVES.replace("native", "native+grouped"),
)
# The most quoted parts come first.
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
    Part(
        "step_time_grouped",
        (2,),
        f"{_TIMES} --configurations C D 'C:--expert-model-parallel-size 1' --variants {shlex.join(_KINDS_OF_GRAPHS)}",
        300,
    ),
    Part("step_time_exchange", (2,), f"{_TIMES} --configurations C --variants {shlex.join(_EXCHANGED)}", 120),
    Part(
        "step_time_c",
        (4,),
        f"{_TIMES} --configurations C --variants {shlex.join(_EXCHANGED)} --expert-parallel 4",
        120,
    ),
    *(
        Part(f"step_time_{name}", (2,), f"{_SIZED} --configurations {model} --variants {shlex.join(variants)}", 200)
        for name, model, variants in (
            ("llama_3b", "llama-3.2-3b", _LLAMA),
            ("llama_8b", "llama-3.1-8b", _LLAMA),
            ("qwen", "qwen3-30b-a3b", _GROUPED.split()),
            ("qwen_ep1", "qwen3-30b-a3b --expert-parallel 1", _QWEN_EP1),
            ("deepseek", "deepseek-v3", _GROUPED.split()),
        )
    ),
    Part("demo", (1, 2), "examples/demo.py --json FILE", 80),
    Part("equality", (1,), f"{_EQUALITY}", 450),
    *(Part(f"equality_{part}", (2, 4), f"{_EQUALITY} --share {part}/2", 450) for part in (1, 2)),
    # Layouts that require four GPUs: HSDP replicas of several shards, replicated experts or tensors.
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
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        SystemExit: An argument is invalid.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=RESULTS / "release", help="folder for the results")
    parser.add_argument("--gpus", type=int, help="number of GPUs (default: all of this machine)")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="names of parts; * matches any text")
    parser.add_argument("--commit", help="measured commit (default: the current one)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="time limit for all parts; skips parts longer than the remaining time",
    )
    parser.add_argument("--launches", type=int, default=2, help="launches of dense models; times are medians over them")
    parser.add_argument("--list", action="store_true", help="list the parts, and measure nothing")
    return parser.parse_args(arguments)


def git(*arguments: str) -> str:
    """Return the output of git in this repository; empty on failure."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def current_commit() -> str:
    """Return the commit of this repository, with ``+`` appended if the patch has uncommitted changes.

    Raises:
        SystemExit: There is no repository.
    """
    commit = git("rev-parse", "--short=10", "HEAD")
    if not commit:
        raise SystemExit("there is no git repository here: pass --commit")
    return commit + ("+" if git("status", "--porcelain", "--", *PRODUCT) else "")


def measured(file: Path) -> dict[str, Any]:
    """Return the content of a results file, empty if it does not exist."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def run(part: Part, file: Path, commit: str, seconds: float, **words: int) -> bool:
    """Run ``part``, add ``commit`` to its results in ``file``, and return whether it succeeded.

    Args:
        seconds: Time limit.
        words: Values for the placeholders in the arguments of the part, except ``FILE`` and ``SECONDS``.
    """
    log = file.parent / "logs" / f"{file.stem}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    replaced = {"FILE": file, "SECONDS": int(seconds), **words}
    command = [sys.executable, *(str(replaced.get(word, word)) for word in shlex.split(part.arguments))]
    file.unlink(missing_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            end(process)
    if file.exists():
        found = measured(file) | {"commit": commit, "exit": status}
        found.pop("numbers", None)  # losses of each step, which were compared
        write_json(file, found)
    return status == 0 and file.exists()


def end(process: subprocess.Popen) -> None:
    """Terminate the session of ``process`` to free its GPUs for the next part."""

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


def main() -> int:
    """Run or list the selected benchmarks, and return the exit code."""
    args = parse()
    if args.list:
        for part in PARTS:
            for gpus in part.gpus:
                commit = measured(part.file(args.folder, gpus)).get("commit", "not measured")
                print(f"{part.name}, {gpus} GPUs, about {part.seconds} s: {commit}")
        return 0
    gpus, commit = args.gpus or torch.cuda.device_count(), args.commit or current_commit()
    parts = [part for part in PARTS if gpus in part.gpus and any(fnmatch(part.name, name) for name in args.only)]
    deadline = time.monotonic() + args.seconds
    failed = False
    for number, part in enumerate(parts, 1):
        what = f"{number} of {len(parts)}: {part.name}"
        file, begun = part.file(args.folder, gpus), time.monotonic()
        before, left = measured(file), deadline - begun
        if before.get("commit") == commit and before.get("exit") == 0:
            print(f"{what}: already measured", flush=True)
        elif part.seconds > left:
            print(f"{what}: skipped: takes about {part.seconds} s", flush=True)
        else:
            print(f"{what}: about {part.seconds} s ...", flush=True)
            done = run(part, file, commit, min(left, LONGEST), GPUS=gpus, LAUNCHES=args.launches)
            failed = failed or not done
            print(f"{what}: {'done' if done else 'FAILED'}, {time.monotonic() - begun:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    sys.exit(main())
