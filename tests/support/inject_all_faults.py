"""Runs ``inject_faults.py`` at every place, in several pairs of CPU ranks side by side, and adds up what they found.

    python tests/support/inject_all_faults.py --pairs 14 --output benchmarks/results/faults_in_capture.json

A pair takes every ``--pairs``-th place; it keeps two cores busy. Further options go to ``inject_faults.py``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.results_file import command_line, write_results  # noqa: E402

FAULTS = ROOT / "tests" / "support" / "inject_faults.py"
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def main() -> int:
    """Run the command line; return 1 if an attempt did not pass or a pair died."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--output", type=Path, required=True, help="where the sums go, as JSON")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{pair}.json" for pair in range(args.pairs)]
        running = [start(pair, args.pairs, output, options) for pair, output in enumerate(outputs)]
        died = [process.args for process in running if process.wait()]
        results = [json.loads(output.read_text())["results"] for output in outputs if output.exists()]
    sums = [add_up(list(of_case)) for of_case in zip(*results, strict=True)]
    write_results(
        args.output,
        command=command_line("tests/support/inject_all_faults.py", sys.argv[1:]),
        gpus=0,
        pairs_that_died=len(died),
        results=sums,
    )
    for each in sums:
        print(f"{each['case']}: {sum(each['passed'].values())} of {sum(each['attempts'].values())}")
    return int(bool(died) or any(each["problems"] or each["passed"] != each["attempts"] for each in sums))


def start(pair: int, pairs: int, output: Path, options: list[str]) -> subprocess.Popen[bytes]:
    """Start the ranks of a pair; what they print goes beside their results."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(FAULTS)]
    places = ["--stride", str(pairs), "--first", str(pair)]
    with output.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [*launcher, "--output", str(output), *places, *options], env=os.environ | ON_CPU, stdout=log, stderr=log
        )


def add_up(of_pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up what the pairs found for one case."""
    counts = ("attempts", "passed")
    summed = {key: dict(sum((Counter(each[key]) for each in of_pairs), Counter())) for key in counts}
    return {
        "case": of_pairs[0]["case"],
        "ranks": of_pairs[0]["ranks"],
        "places": of_pairs[0]["places"],
        **summed,
        "unreached": sum(each["unreached"] for each in of_pairs),
        "steps_compared": sum(each["steps_compared"] for each in of_pairs),
        "slowest_seconds": max(each["slowest_seconds"] for each in of_pairs),
        "problems": [problem for each in of_pairs for problem in each["problems"]],
    }


if __name__ == "__main__":
    sys.exit(main())
