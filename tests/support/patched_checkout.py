"""Apply the patch to a megatron-core checkout, and check imports, eager training and tests.

    python -m tests.support.patched_checkout FOLDER [--quick]

FOLDER must not exist. The overlay is disabled in the checkout. --quick runs a few tests only.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_fsdp_cuda_graphs.overlay import patched_modules
from tests.support.trainings.eager_training import CASES

from .linked_core import installed

REPOSITORY = Path(__file__).resolve().parents[2]
UNIT_TESTS = REPOSITORY / "tests" / "unit_tests" / "core"
QUICK = ("optimizer/test_empty_shards.py", "transformer/_cuda_graphs/engine/test_make_graphed_callables.py")
WHOLE = ("optimizer", "transformer/_cuda_graphs", "transformer/moe")
# These tests compare with megatron-core's originals, which requires the overlay.
WITH_OVERLAY = re.compile(r"megatron_fsdp_cuda_graphs\.overlay|import overlay|tests\.support\.replaced")


class Checkout:
    """Git repository of the installed megatron-core, and processes that import it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = os.pathsep.join(filter(None, [str(folder), str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        self._environment = os.environ | {"MEGATRON_FSDP_CUDA_GRAPHS": "0", "PYTHONPATH": path}
        self._environment |= {"PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
        shutil.copytree(installed() / "megatron", folder / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / ".gitignore").write_text("__pycache__\n")
        self.git("init", "--quiet")
        self.git("add", "--all", "--force")
        self.git("commit", "--quiet", "--message", "megatron-core")

    def git(self, *arguments: str, given: bytes | None = None) -> str:
        """Run git with ``given`` as input and return its output."""
        identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        command = ["git", "-C", str(self.folder), *identity, *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, input=given).stdout.decode()

    def apply_patch(self) -> None:
        """Apply the patch with ``git am``."""
        command = [sys.executable, "-m", "tools.patch", str(self.folder)]
        self.git("am", "--quiet", given=subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        assert not self.git("status", "--porcelain")

    def python(self, *arguments: str) -> str:
        """Run Python and return its output; on failure, exit with the end of the output."""
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=self._environment, cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout[-6000:]}{done.stderr[-6000:]}\nfailed: {' '.join(arguments)}")
        return done.stdout

    def import_all(self) -> None:
        """Import each module of the patch from this checkout."""
        code = "import importlib, sys\nfor name in sys.argv[2:]:\n    file = importlib.import_module(name).__file__"
        code += "\n    assert file.startswith(sys.argv[1]), file"
        self.python("-c", code, str(self.folder), *patched_modules())

    def eager(self) -> list[str]:
        """Train without graphs and return the printed numbers."""
        code = (
            "from tests.support.ranks.run_ranks import on_two_ranks;"
            "done = on_two_ranks('tests/support/trainings/eager_training.py');"
            "print(done.stdout); raise SystemExit(done.returncode)"
        )
        lines = [line for line in self.python("-c", code).splitlines() if line.partition(":")[0] in CASES]
        assert len(lines) == len(CASES), lines
        return lines


def main() -> None:
    """Run the command-line interface."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    checkout = Checkout(args.folder.resolve())
    before = checkout.eager()
    checkout.apply_patch()
    checkout.import_all()
    after = checkout.eager()
    if after != before:
        raise SystemExit("\n".join(["eager training differs", *before, "and with the patch", *after]))
    print("the patch applies, its modules import, eager training is bit-identical", flush=True)
    files = QUICK if args.quick else [path for name in WHOLE for path in sorted((UNIT_TESTS / name).rglob("test_*.py"))]
    tests = [str(UNIT_TESTS / file) for file in files if not WITH_OVERLAY.search((UNIT_TESTS / file).read_text())]
    print(checkout.python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long", *tests))


if __name__ == "__main__":
    main()
