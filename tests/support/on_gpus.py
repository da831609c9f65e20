"""Runs a file of ``tests/gpu`` on all GPUs of this machine, and writes what its trainings gave beside eager ones.

python -m tests.support.on_gpus test_fsdp_graphs --output equality.json
"""

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

TESTS = Path(__file__).parents[1] / "gpu"


def main() -> int:
    """Run the tests and return pytest's exit code; 1 if they wrote no results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", help="the file's name without its ending")
    parser.add_argument("--output", type=Path, required=True, help="file of the results, JSON")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        os.environ["EQUALITY_RESULTS"] = folder
        code = int(pytest.main(["-q", str(TESTS / f"{args.tests}.py")]))
        found = Path(folder) / f"{args.tests}.json"
        if not found.exists():
            return code or 1
        args.output.write_text(found.read_text())
    return code


if __name__ == "__main__":
    sys.exit(main())
