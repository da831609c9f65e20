"""What the patch takes from megatron-core: names that it imports or reads, definitions that it takes the place of."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_fsdp_cuda_graphs.overlay import ROOT, patched_modules, tree_file

from .sources import Definition, imported_from, parsed, statements


@dataclass(frozen=True)
class Reliance:
    """Something of megatron-core's that a file of the patch needs.

    Attributes:
        path: What of it, such as ``Class.method``; empty for the module itself.
        overridden: Whether the patch puts a definition of its own in the place of this one.
        later: What a later megatron-core may call it.
        takes_any: Whether that definition takes any parameters, and passes them on.
    """

    file: str
    line: int
    module: str
    path: str
    overridden: bool = False
    later: str = ""
    takes_any: bool = False

    def __str__(self) -> str:
        what = f"{self.module}.{self.path}" if self.path else self.module
        return f"{what} ({self.file}:{self.line})"


@functools.cache
def reliances() -> tuple[Reliance, ...]:
    """Return what the files of the patch rely on, file by file."""
    files = ((name, tree_file(name)) for name in patched_modules())
    return tuple(dict.fromkeys(each for name, path in files if path is not None for each in _of_file(name, path)))


def _of_file(name: str, path: Path) -> Iterator[Reliance]:
    tree, file = parsed(path), str(path.relative_to(ROOT))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    guarded = {id(inside) for node in ast.walk(tree) if isinstance(node, ast.Try) for inside in ast.walk(node)}
    originals: dict[str, str] = {}  # by variable: the module of megatron-core behind it
    later: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in guarded:
            source = imported_from(node, package)
            if source.startswith(("megatron.core", "megatron.training")):
                yield from (Reliance(file, node.lineno, source, alias.name) for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            source = _original(node.value, name)
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if source and isinstance(target, ast.Name):
                originals[target.id] = source
                later |= _later(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            source = originals.get(node.value.id, "") if isinstance(node.value, ast.Name) else ""
            source = source or _original(node.value, name)
            if source:
                yield Reliance(file, node.lineno, source, node.attr)
    if name in originals.values():
        for each in _overridden(tree, name, file, originals):
            owner, _, rest = each.path.partition(".")
            yield replace(each, later=f"{later[owner]}.{rest}") if owner in later else each


def _later(call: ast.expr) -> dict[str, str]:
    """Return the names of the patch that ``extend`` lets stand for others, and these."""
    assert isinstance(call, ast.Call)
    return ast.literal_eval(call.args[1]) if len(call.args) > 1 else {}


def _takes_any(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return function.args.vararg is not None and function.args.kwarg is not None


def _original(node: ast.expr, name: str) -> str:
    """Return the module that ``extend(__name__)`` stands for; empty for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    return name if isinstance(function, ast.Name) and function.id == "extend" else ""


def _overridden(tree: ast.Module, name: str, file: str, originals: dict[str, str]) -> Iterator[Reliance]:
    """Yield the functions of an extended module that ``tree`` defines anew, and the methods of classes it extends."""
    for statement in statements(tree.body):
        if not isinstance(statement, Definition):
            continue
        if not isinstance(statement, ast.ClassDef):
            yield Reliance(
                file, statement.lineno, name, statement.name, overridden=True, takes_any=_takes_any(statement)
            )
            continue
        for base in statement.bases:
            if not (isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name)):
                continue
            source = originals.get(base.value.id)
            for method in statements(statement.body):
                if source and isinstance(method, ast.FunctionDef):
                    path, takes_any = f"{base.attr}.{method.name}", _takes_any(method)
                    yield Reliance(file, method.lineno, source, path, overridden=True, takes_any=takes_any)
