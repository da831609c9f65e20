"""Launches small eager and graphed trainings on two CPU ranks again and again, and counts the launches that die.

    CUDA_VISIBLE_DEVICES= python -m tests.support.loop_launches 100

Exits with 1 if a launch died, or if graphed training differed from eager.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .launch import launch

SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "sequence": 16, "steps": 6, "warmup": 2, "dropout": 0.1}
LOCAL: dict[str, Any] = {"local": True, "warmup": 1}
MOE: dict[str, Any] = {"experts": 4, "modules": ["attn", "moe_router"]}
DATA_PARALLEL: list[dict[str, Any]] = [
    {"microbatches": 2},
    {"dtype": "bf16", **MOE},
    {"fsdp": False, "microbatches": 2},
    {"fsdp": False, **LOCAL},
]
PIPELINE: list[dict[str, Any]] = [
    {"fsdp": False, "microbatches": 4},
    {"fsdp": False, "microbatches": 4, **LOCAL},
]


def main() -> int:
    """Run the launches, print each that fails with the end of its output, and the count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launches", type=int, help="how many launches")
    launches = parser.parse_args().launches
    died = differed = 0
    for number in range(1, launches + 1):
        start = time.perf_counter()
        cases, options = (PIPELINE, ["--pp", "2"]) if number % 3 == 0 else (DATA_PARALLEL, [])
        with tempfile.TemporaryDirectory() as folder:
            done, results = launch([SMALL | case for case in cases], *options, ranks=2, folder=Path(folder))
        differences = [line for result in results for line in [result["error"], *result["differences"]] if line]
        died += done.returncode != 0
        differed += bool(differences)
        if done.returncode or differences:
            print(done.stderr[-4000:], *differences, sep="\n")
        seconds = time.perf_counter() - start
        print(f"launch {number} of {launches}: {died} died, {differed} differed ({seconds:.0f} s)", flush=True)
    return 1 if died or differed else 0


if __name__ == "__main__":
    sys.exit(main())
