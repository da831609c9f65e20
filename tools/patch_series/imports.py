"""The imports of a file of megatron-core that has definitions of ours."""

import ast
import sys
from collections.abc import Collection, Iterable
from itertools import takewhile
from typing import TypeGuard

from .source import Source, bound, parsed, used_names


def with_imports(
    text: str, ours: Iterable[ast.stmt], used: Collection[str], moved: Collection[str], gone: Collection[str]
) -> str:
    """Return ``text`` with the imports that definitions of ours need, beside those of the same packages.

    Args:
        text: A file of megatron-core with these definitions.
        ours: The statements of our file, of which the imports are taken.
        moved: Names that ``text`` imports now and defined before.
        gone: Names that ``text`` imports and does not need any more.
    """
    source, used_here = Source(text), used_names(parsed(text))
    needed = {*moved, *(set(used) & used_here - source.names.keys())}
    unused = set(moved) - used_here
    head = takewhile(lambda node: not isinstance(node, ast.ClassDef | ast.FunctionDef), source.body)
    theirs = [node for node in head if _is_import(node)]
    edits: list[tuple[int, int, list[str]]] = []  # the lines to replace, and by what
    for node in theirs:
        kept = [alias for alias in node.names if (alias.asname or alias.name) not in gone]
        if len(kept) < len(node.names):
            left = [ast.unparse(_statement(node, kept))] if kept else []
            edits.append((node.lineno - 1, node.end_lineno or 0, left))
    for node in filter(_is_import, ours):
        taken = [alias for alias in node.names if bound(_statement(node, [alias])).keys() & needed]
        if taken:
            alike = [each for each in theirs if _origin(each) == _origin(node)]
            before = [each for each in alike if _module(each) <= _module(node)]
            below = max(before, key=_module).end_lineno or 0 if before else (alike or theirs)[0].lineno - 1
            edits.append((below, below, [_line(node, alias, unused) for alias in taken]))  # which ruff joins
    lines = list(source.lines)
    for start, end, new in sorted(edits, reverse=True):
        lines[start:end] = new
    return "".join(f"{each}\n" for each in lines)


def _is_import(node: ast.stmt) -> TypeGuard[ast.Import | ast.ImportFrom]:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _statement(node: ast.Import | ast.ImportFrom, names: list[ast.alias]) -> ast.stmt:
    """Return the import of only some names of ``node``."""
    new = ast.Import(names) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, names, node.level)
    return ast.copy_location(new, node)


def _line(node: ast.Import | ast.ImportFrom, alias: ast.alias, unused: Collection[str]) -> str:
    note = "  # noqa: F401" if (alias.asname or alias.name) in unused else ""
    return ast.unparse(_statement(node, [alias])) + note


def _module(node: ast.Import | ast.ImportFrom) -> str:
    return node.names[0].name if isinstance(node, ast.Import) else "." * node.level + (node.module or "")


def _origin(node: ast.Import | ast.ImportFrom) -> str:
    """Return the outermost package that ``node`` imports from; a dot for the own one, empty for Python's."""
    package, dot, _ = _module(node).partition(".")
    return dot if not package else "" if package in sys.stdlib_module_names else package
