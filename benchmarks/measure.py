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
from collections.abc import Sequence
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
        arguments: Command line after ``python``, with placeholders ``GPUS``, ``FILE`` and ``SECONDS``.
        seconds: Approximate time on one H100; slightly longer on more GPUs.
    """

    name: str
    gpus: tuple[int, ...]
    arguments: str
    seconds: int = 300

    def file(self, folder: Path, gpus: int) -> Path:
        """Return the file for the results."""
        return folder / f"{self.name}_{gpus}gpu.json"


_TIMES = "benchmarks/step_time.py --gpus GPUS --output FILE --stall-seconds 120"
_EQUALITY = "-m tests.support.trainings.on_gpus --seconds SECONDS --output FILE"
_ON_FOUR_ONLY = "'two instances' 'TP2 with sequence parallelism' 'EP2 with ETP2' 'EP of all' PP2 'PP2 with VPP2'"
_ALL = ("eager", "native", "full_iteration", "compute_alone")
_GROUPED = "eager+grouped", "native+grouped", "compute_alone+grouped"
_EXPERTS = (
    "eager",
    "native",
    *_GROUPED[:2],
    "full_iteration+grouped",
)  # ranks without collectives would exchange no tokens
_PARTS = "native::--cuda-graph-modules attn mlp"
_PER_LAYER = "native::--cuda-graph-layers-per-graph 1"
_EP1 = "--expert-model-parallel-size 1"
_QWEN_EP1 = f"qwen3-30b-a3b:{_EP1}"
_LONG = "--seq-length 8192 --max-position-embeddings 8192"
# Copy engines gather parameters, and gradients are averaged in the collective instead of a separate kernel.
_SETTINGS = "+fused:NCCL_CTA_POLICY=2:--use-nccl-ub --ddp-average-in-collective"
_KINDS = "A:--fp8-format hybrid --fp8-recipe delayed --fp8-param-gather", "A:--mtp-num-layers 1"


def _trained(*pairs: tuple[str, Sequence[str]], steps: int = 40) -> str:
    """Return a command that trains configurations, each with its variants."""
    trained = [f"--train {shlex.join([configuration, *variants])}" for configuration, variants in pairs]
    return " ".join([_TIMES, f"--steps {steps}", *trained])


# Large models come first in a launch, because processes keep some memory of earlier runs.
PARTS = (
    Part(
        "step_time_llama",
        (2,),
        _trained(
            ("llama-3.1-8b", (*_ALL, _PARTS)),
            (f"llama-3.1-8b:{_LONG}", ("eager", "native")),
            ("llama-3.2-3b", (*_ALL, _PARTS)),
            ("llama-3.2-3b:--global-batch-size 16", ("eager", "native")),
            steps=20,
        ),
        350,
    ),
    Part(
        "step_time_experts",
        (2,),
        _trained(
            ("deepseek-v3", _EXPERTS),
            ("qwen3-30b-a3b", _EXPERTS),
            (_QWEN_EP1, _GROUPED),
            steps=20,
        ),
        400,
    ),
    Part(
        "step_time_settings",
        (2,),
        _trained(
            ("llama-3.1-8b", (f"native{_SETTINGS}", "compute_alone+fused")),
            ("llama-3.2-3b", (f"native{_SETTINGS}", "compute_alone+fused")),
            (_QWEN_EP1, (f"native+grouped{_SETTINGS}", "compute_alone+grouped+fused")),
            ("A", ("eager+fused", "native+fused", f"native{_SETTINGS}", f"full_iteration{_SETTINGS}")),
            steps=20,
        ),
        280,
    ),
    Part(
        "step_time_settings_moe",
        (2,),
        _trained(
            (
                f"C:{_EP1}",
                (
                    "eager+grouped+fused",
                    "native+grouped+fused",
                    f"native+grouped{_SETTINGS}",
                    "compute_alone+grouped+fused",
                ),
            ),
        ),
        120,
    ),
    Part(
        "step_time_dense",
        (2,),
        _trained(
            ("A", (*_ALL, _PARTS)),
            ("B:--num-layers 64", ("eager", "native", _PER_LAYER)),
            *((kind, ("eager", "native")) for kind in _KINDS),
        ),
        180,
    ),
    Part("step_time_b", (2,), f"{_trained(('B', _ALL))} --profile", 120),
    Part(
        "step_time_moe",
        (2,),
        _trained(
            ("C", (*_EXPERTS, "native+grouped::--moe-token-dispatcher-type allgather")),
            ("D", _EXPERTS),
            *((f"{name}:{_EP1}", _GROUPED) for name in ("C", "D")),
        ),
        280,
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


def run(part: Part, file: Path, commit: str, seconds: float, gpus: int) -> bool:
    """Run ``part`` for at most ``seconds``, add ``commit`` to its results, and return whether it succeeded."""
    log = file.parent / "logs" / f"{file.stem}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    replaced = {"FILE": file, "SECONDS": int(seconds), "GPUS": gpus}
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
            done = run(part, file, commit, min(left, LONGEST), gpus)
            failed = failed or not done
            print(f"{what}: {'done' if done else 'FAILED'}, {time.monotonic() - begun:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    sys.exit(main())
