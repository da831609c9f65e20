"""The imports of a file of megatron-core that has definitions of ours, in the order that isort gives them."""

import ast
import sys
from collections.abc import Collection, Iterable
from itertools import takewhile

from .source import Source, bound, parsed, used_names

WIDTH = 100  # of megatron-core's lines
Line = tuple[int, int, str]  # where isort puts an import: section, `from` after `import` (0), module
Names = dict[str, str]  # with each name in a module the one that it is bound to


def with_imports(
    text: str, ours: Iterable[ast.stmt], used: Collection[str], moved: Collection[str], gone: Collection[str]
) -> str:
    """Return ``text`` with the imports that definitions of ours need.

    Args:
        text: A file of megatron-core with these definitions.
        ours: The statements of our file, of which the imports are taken.
        moved: Names that ``text`` imports now and defined before.
        gone: Names that ``text`` imports and does not need any more.
    """
    source, used_here = Source(text), used_names(parsed(text))
    needed = {*moved, *(set(used) & used_here - source.names.keys())}
    unused = set(moved) - used_here
    wanted: dict[Line, Names] = {}
    for node in (node for node in ours if isinstance(node, ast.Import | ast.ImportFrom)):
        taken = [alias for alias in node.names if bound(ast.copy_location(_alone(node, alias), node)).keys() & needed]
        for alias in taken:
            wanted.setdefault(_line(node, alias), {})[alias.name] = alias.asname or alias.name
    lines = list(source.lines)
    for node in reversed(_imports(text)):
        line = _line(node, node.names[0])
        names = _names(node)
        kept = {name: own for name, own in names.items() if own not in gone}
        kept |= wanted.pop(line, {}) if line[1] else {}
        if kept != names:
            lines[node.lineno - 1 : node.end_lineno] = _statement(line, kept, unused) if kept else []
    for line, names in sorted(wanted.items()):
        known = {_line(node, node.names[0]): node for node in _imports("\n".join(lines))}
        same = {key: node for key, node in known.items() if key[0] == line[0]}
        before = max((key for key in same or known if key < line), default=None)
        statement = [*([] if same else [""]), *_statement(line, names, unused)]
        at = known[before].end_lineno if before is not None else min((same or known).items())[1].lineno - 1
        lines[at:at] = statement
    return "".join(f"{each}\n" for each in lines)


def _imports(text: str) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports in front of the first definition."""
    body = takewhile(lambda node: not isinstance(node, ast.ClassDef | ast.FunctionDef), parsed(text).body)
    return [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]


def _alone(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.stmt:
    return ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], node.level)


def _names(node: ast.Import | ast.ImportFrom) -> Names:
    return {alias.name: alias.asname or alias.name for alias in node.names}


def _line(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> Line:
    """Return where isort puts an import."""
    if isinstance(node, ast.Import):
        return _section(alias.name), 0, alias.name
    if node.level:
        return 4, 9 - node.level, "." * node.level + (node.module or "")
    return _section(node.module or ""), 1, node.module or ""


def _section(module: str) -> int:
    top = module.partition(".")[0]
    if top == "__future__":
        return 0
    return 1 if top in sys.stdlib_module_names else 3 if top == "megatron" else 2


def _statement(line: Line, names: Names, unused: set[str]) -> list[str]:
    _, is_from, module = line
    if not is_from:
        return [f"import {module}"]
    parts = [name if name == own else f"{name} as {own}" for name, own in sorted(names.items(), key=_order)]
    whole = f"from {module} import {', '.join(parts)}"
    if unused & {*names.values()}:
        whole += "  # noqa: F401"
    return [whole] if len(whole) <= WIDTH else [f"from {module} import (", *(f"    {part}," for part in parts), ")"]


def _order(item: tuple[str, str]) -> tuple[int, str]:
    name = item[0]
    return (0 if name.isupper() else 1 if name.lstrip("_")[:1].isupper() else 2), name
