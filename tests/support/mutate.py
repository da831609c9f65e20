"""Breaks a file in one place at a time, and lists the breaks that no test notices.

    python -m tests.support.mutate FILE [FILE...] --tests TEST [TEST...] [--jobs 2] [--lines 40-90] [--every 1]

A break is a condition negated, ``and`` for ``or``, a true for a false, a number one larger, or a statement left out: a
call, an assignment to an attribute or an item, ``raise``, ``del``. The tests run with ``-x`` in a copy of this tree;
a test that fails or takes three times as long as on the whole file has noticed. Exits with 1 if a break survived.
"""

import argparse
import ast
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Break:
    """The text of ``file`` from byte ``start`` to ``end``, in line ``line``, and what to write in its place."""

    file: Path
    line: int
    start: int
    end: int
    instead: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.instead.encode() + source[self.end :]

    def describe(self, source: bytes) -> str:
        text = " ".join(source[self.start : self.end].decode().split())
        return f"{self.file}:{self.line}: {text[:70]}  ->  {self.instead[:70]}"


def breaks(file: Path, source: bytes) -> Iterator[Break]:
    """All breaks of ``file``, in the order of its lines."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = [place for node in _nodes(ast.parse(source)) for place in _replacements(node)]
    for broken, instead in sorted(found, key=lambda place: (place[0].lineno, place[0].col_offset)):
        start = starts[broken.lineno - 1] + broken.col_offset
        end = starts[(broken.end_lineno or broken.lineno) - 1] + (broken.end_col_offset or 0)
        yield Break(file, broken.lineno, start, end, instead or f"(not ({source[start:end].decode()}))")


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and all below it, without decorators."""
    yield node
    for child in ast.iter_child_nodes(node):
        if child not in getattr(node, "decorator_list", ()):
            yield from _nodes(child)


def _replacements(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """The parts of ``node`` to break, not those of its children, and what to write there: nothing to negate it."""
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test, ""
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield node, "(" + word.join(f"({ast.unparse(value)})" for value in values) + ")"
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() as value):
            yield node, str(value + 1)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Delete() | ast.AugAssign():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            for test in (test for generator in node.generators for test in generator.ifs):
                yield test, ""


class Copy:
    """A copy of the tree, in which tests run."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "build", "demo-output"))
        (folder / ".site").mkdir()
        (folder / ".site" / "megatron_fsdp_cuda_graphs").symlink_to(folder / "megatron_fsdp_cuda_graphs")

    def passes(self, tests: list[str], timeout: float | None = None) -> bool:
        """Whether ``tests`` pass, within ``timeout`` seconds."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        own = {"PYTHONPATH": str(self.root / ".site"), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=self.root, env=os.environ | own, capture_output=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def main() -> int:
    """Break every place and print those that survive as they are found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="files to break, relative to the root of the tree")
    parser.add_argument("--tests", nargs="+", required=True, help="files of tests, or tests, as pytest takes them")
    parser.add_argument("--jobs", type=int, default=1, help="how many breaks to try at once")
    parser.add_argument("--lines", default="1-1000000", help="FIRST-LAST lines to break, in every file")
    parser.add_argument("--every", type=int, default=1, help="of the breaks one in so many")
    args = parser.parse_args()
    first, last = map(int, args.lines.split("-"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(args.jobs):
            copies.put(Copy(Path(folder) / str(number)))
        start = time.perf_counter()
        whole = copies.get()
        if not whole.passes(args.tests):
            parser.error(f"{' '.join(args.tests)}: these tests fail without any break")
        copies.put(whole)
        timeout = 3 * (time.perf_counter() - start) + 30

        def survives(broken: Break) -> bool:
            copy, source = copies.get(), (ROOT / broken.file).read_bytes()
            (copy.root / broken.file).write_bytes(broken.apply(source))
            try:
                survived = copy.passes(args.tests, timeout)
            finally:
                (copy.root / broken.file).write_bytes(source)
                copies.put(copy)
            if survived:
                print("SURVIVED", broken.describe(source), flush=True)
            return survived

        tried = [
            broken
            for file in args.files
            for broken in breaks(file, (ROOT / file).read_bytes())
            if first <= broken.line <= last
        ][:: args.every]
        survivors = sum(pool.map(survives, tried))
    print(f"{survivors} of {len(tried)} breaks survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
