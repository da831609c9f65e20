"""Applies the patches one by one to a checkout: after each everything imports, eager training is what it was without,
and its tests pass. Each of those that mend a fault is also applied alone.

    python -m tests.support.patch_by_patch FOLDER [--quick]

With --quick there are only the tests of the first three patches and the last, and training is compared at the end.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tools.patch_series.contents import imports
from tools.patch_series.series import SERIES, Patch

from .eager_training import CASES
from .patch_tests import TESTS

REPOSITORY = Path(__file__).resolve().parents[2]
# A pretraining, a model, and what all patches change: imported after each patch, in one process.
EVERYTHING = ("megatron.training.training", "megatron.core.models.gpt", "megatron.core.distributed.fsdp")
# Of tests: they compare with megatron-core's own definitions, which a checkout with the patch has not, or are about the
# place of sources.
WITHOUT = "not megatron_cores and not source_is_found and not in_a_table and not pickles_load"


class Checkout:
    """A git repository of megatron-core's files, and commands that import from it without this project's start-up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = os.pathsep.join(filter(None, [str(folder), str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        self._environment = os.environ | {"MEGATRON_FSDP_CUDA_GRAPHS": "0", "PYTHONPATH": path}
        self._environment |= {"PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}

    def git(self, *arguments: str) -> str:
        """Run git in it; return what it writes."""
        identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        command = ["git", "-C", str(self.folder), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def python(self, *arguments: str) -> str:
        """Run Python; return its output. Ends this process with the end of it if it fails."""
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=self._environment, cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout[-6000:]}{done.stderr[-6000:]}\nfailed: {' '.join(arguments)}")
        return done.stdout

    def eager(self) -> list[str]:
        """Return what eager training computes."""
        code = (
            "from tests.support.run_ranks import on_two_ranks;"
            "done = on_two_ranks('tests/support/eager_training.py');"
            "print(done.stdout); raise SystemExit(done.returncode)"
        )
        return [line for line in self.python("-c", code).splitlines() if line.partition(":")[0] in CASES]

    def test(self, patch: Patch) -> None:
        """Run the tests of ``patch``."""
        tests, selected = TESTS[patch.title]
        which = " and ".join(filter(None, [selected and f"({selected})", WITHOUT]))
        paths = [str(file) for path in tests for file in self._tests_in(REPOSITORY / "tests/unit_tests" / path)]
        assert paths, patch
        self.python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long", *paths, "-k", which)

    def _tests_in(self, path: Path) -> list[Path]:
        """Return the file ``path``, or those with tests in the folder all of whose imports are in the checkout."""
        return [path] if path.is_file() else [*filter(self._imports_are_there, sorted(path.rglob("test_*.py")))]

    def _imports_are_there(self, file: Path) -> bool:
        todo = [file]
        for each in todo:  # which grows by the modules of tests that they import
            package = ".".join(each.relative_to(REPOSITORY).parent.parts)
            for module, name in imports(each.read_text(), package):
                place, inner = (Path(*dotted.split(".")) for dotted in (module, f"{module}.{name}"))
                helpers = [REPOSITORY / helper.with_suffix(".py") for helper in (place, inner)]
                if module.startswith("tests"):
                    todo += [helper for helper in helpers if helper.is_file() and helper not in todo]
                needed = [
                    path.with_suffix(".py")
                    for path in (place, inner)
                    if (REPOSITORY / path).with_suffix(".py").is_file()
                ]
                if module.startswith("megatron.") and not all((self.folder / path).is_file() for path in needed):
                    return False
        return True


def look_at(checkout: Checkout, patch: Patch, expected: list[str], what: str) -> None:
    """Import what the last commit changes, train, and test."""
    changed = checkout.git("diff", "--name-only", "HEAD~1").split()
    modules = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in changed]
    checkout.python(str(REPOSITORY / "tests/support/import_each.py"), *modules, *EVERYTHING)
    compare(expected, checkout.eager(), what)
    checkout.test(patch)
    print(f"{what}: {len(modules)} modules import, eager training is the same, its tests pass", flush=True)


def compare(expected: list[str], computed: list[str], what: str) -> None:
    """End this process if eager training computes something else."""
    if computed != expected:
        raise SystemExit("\n".join([f"{what}: eager training differs", *expected, "and", *computed]))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder for the checkout and the patches")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    checkout, patches = Checkout(args.folder / "checkout"), args.folder / "patches"
    subprocess.run([sys.executable, str(REPOSITORY / "tests/support/checkout.py"), str(checkout.folder)], check=True)
    command = [sys.executable, "-m", "tools.patch_series", str(checkout.folder), str(patches)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    files = sorted(patches.glob("*/*.patch"))
    assert len(files) == len(SERIES)
    expected = checkout.eager()
    assert len(expected) == len(CASES), expected
    for patch, file in zip(SERIES, files, strict=True):
        if patch.changes and not args.quick:
            checkout.git("checkout", "--quiet", "-B", "alone", "megatron-core")
            checkout.git("am", "--quiet", str(file.resolve()))
            look_at(checkout, patch, expected, f"alone, {file.name}")
    checkout.git("checkout", "--quiet", "-B", "series", "megatron-core")
    for patch, file in zip(SERIES, files, strict=True):
        checkout.git("am", "--quiet", str(file.resolve()))
        if not args.quick:
            look_at(checkout, patch, expected, f"{file.parent.name}/{file.name}")
        elif patch in (*SERIES[:3], SERIES[-1]):
            checkout.test(patch)
            print(f"{file.parent.name}/{file.name}: its tests pass", flush=True)
    if args.quick:
        compare(expected, checkout.eager(), "with all patches")
        print("with all patches: eager training is the same")


if __name__ == "__main__":
    main()
