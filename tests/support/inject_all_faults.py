"""Runs ``inject_faults.py`` at every place, in several pairs of CPU ranks side by side, and adds up what they found.

    python tests/support/inject_all_faults.py --pairs 14 --output faults_in_capture.json

A pair takes every ``--pairs``-th place; it keeps two cores busy. With ``--seconds`` no fault is tried later: the places
that remain count as left out, and pairs that have not ended ``GRACE`` seconds after that are stopped. Further options
go to ``inject_faults.py``. Sums are written as they come. A folder beside the output keeps the logs of the pairs that
died or were stopped, and the end of one of them is printed.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.results_file import command_line, write_results  # noqa: E402

FAULTS = ROOT / "tests" / "support" / "inject_faults.py"
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
GRACE = 45  # seconds
WRITE_EVERY = 5  # seconds
LINES = 40  # shown of a log


@dataclass
class Pair:
    """Two ranks.

    Attributes:
        output: What they found, as JSON, once there is something.
        log: What they print.
        process: Their launcher.
    """

    output: Path
    log: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, folder: Path, number: int, pairs: int, options: list[str]) -> "Pair":
        """Start the ranks, at their share of the places."""
        output, log = folder / f"{number}.json", folder / f"{number}.log"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(FAULTS)]
        places = ["--stride", str(pairs), "--first", str(number)]
        with log.open("wb") as file:
            command = [*launcher, "--output", str(output), *places, *options]
            return cls(output, log, subprocess.Popen(command, stdout=file, stderr=file))

    def results(self) -> list[dict[str, Any]]:
        """What they found so far, one for each case."""
        found: list[dict[str, Any]] = json.loads(self.output.read_text())["results"] if self.output.exists() else []
        return found

    def last_lines(self) -> list[str]:
        """The end of what the ranks printed, without what the launcher adds when they are dead."""
        return self.log.read_text(errors="replace").partition("failed (exitcode")[0].splitlines()[-LINES:]


def main() -> int:
    """Run the command line; return 1 if an attempt did not pass, or a pair died or was stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--output", type=Path, required=True, help="where the sums go, as JSON")
    parser.add_argument("--seconds", type=float, default=math.inf, help="when pairs begin no further fault")
    args, options = parser.parse_known_args()
    os.environ |= ON_CPU
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    folder = args.output.with_suffix(".pairs")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    end = time.monotonic() + args.seconds + GRACE
    pairs: list[Pair] = []
    try:
        for number in range(args.pairs):
            pairs.append(Pair.start(folder, number, args.pairs, [f"--seconds={args.seconds}", *options]))
        while any(pair.process.poll() is None for pair in pairs) and time.monotonic() < end:
            time.sleep(WRITE_EVERY)
            write(args.output, pairs)
    finally:
        stop(pairs)
    sums = write(args.output, pairs)
    for each in sums:
        attempts, passed, left = (sum(each[key].values()) for key in ("attempts", "passed", "places_left_out"))
        print(f"{each['case']}: {passed} of {attempts} attempts passed, {left} places left out for want of time")
    died = [pair for pair in pairs if pair.process.returncode]
    clear(folder, pairs)
    if died:
        print(f"{len(died)} of {len(pairs)} pairs died or were stopped. {died[0].log}:")
        print(*died[0].last_lines(), sep="\n")
    return int(bool(died) or any(each["problems"] or each["passed"] != each["attempts"] for each in sums))


def stop(pairs: list[Pair]) -> None:
    """Stop the pairs that run."""
    for pair in pairs:
        pair.process.terminate()
    for pair in pairs:
        try:
            pair.process.wait(40)  # a launcher gives its ranks 30 s
        except subprocess.TimeoutExpired:
            pair.process.kill()
            pair.process.wait()


def write(output: Path, pairs: list[Pair]) -> list[dict[str, Any]]:
    """Write the sums of what the pairs found so far; return them."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for pair in pairs:
        for of_case in pair.results():
            cases.setdefault(of_case["case"], []).append(of_case)
    sums = [add_up(each) for each in cases.values()]
    statuses = [pair.process.poll() for pair in pairs]
    write_results(
        output,
        command=command_line("tests/support/inject_all_faults.py", sys.argv[1:]),
        gpus=0,
        pairs=len(pairs),
        pairs_that_died=sum(bool(status) for status in statuses),
        pairs_still_running=sum(status is None for status in statuses),
        results=sums,
    )
    return sums


def clear(folder: Path, pairs: list[Pair]) -> None:
    """Remove what was kept of pairs that ended well."""
    for pair in pairs:
        if not pair.process.returncode:
            pair.output.unlink()
            pair.log.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def add_up(of_pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up what the pairs found for one case."""
    counts = ("places_left_out", "attempts", "passed")
    summed = {key: dict(sum((Counter(each[key]) for each in of_pairs), Counter())) for key in counts}
    return {
        "case": of_pairs[0]["case"],
        "ranks": of_pairs[0]["ranks"],
        "places": {kind: count for each in of_pairs for kind, count in each["places"].items()},
        **summed,
        "unreached": sum(each["unreached"] for each in of_pairs),
        "steps_compared": sum(each["steps_compared"] for each in of_pairs),
        "slowest_seconds": max(each["slowest_seconds"] for each in of_pairs),
        "problems": [problem for each in of_pairs for problem in each["problems"]],
    }


if __name__ == "__main__":
    sys.exit(main())
