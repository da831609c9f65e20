"""Check the patch against a different megatron-core without importing it.

    python -m tools.upstream_check FOLDER

FOLDER contains ``megatron/core``: a Megatron-LM checkout or a site-packages folder. It is compared with the installed
megatron-core. Breaking changes: removed names that the patch imports, overridden functions that were removed or have
new parameters, and names imported from a replaced module that the patch lacks. Changes to review: overridden
definitions with new code. The exit code is 1 if anything would break, 2 if there is nothing to compare.
"""

import argparse
import ast
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from megatron_fsdp_cuda_graphs.overlay import ROOT, find_core, module_file, patched_modules, tree_file

REPLACED = "megatron.core.transformer.cuda_graphs"
UPSTREAM = "_upstream"  # megatron-core's definitions in files of the patch
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_BRANCHES = ast.If | ast.Try | ast.With | ast.For | ast.ExceptHandler


@cache
def parsed(path: Path) -> ast.Module:
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
        return ast.parse(path.read_bytes(), str(path))


def statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the statements of ``body`` and its branches."""
    for node in body:
        yield node
        if isinstance(node, _BRANCHES):
            yield from statements(ast.iter_child_nodes(node))


def bound_names(body: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that ``body`` defines, imports or assigns; ``*`` for a star import."""
    for node in statements(body):
        if isinstance(node, Definition):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
            yield from (each.id for each in names if isinstance(each.ctx, ast.Store))


def imports(file: Path, package: str) -> Iterator[tuple[str, str, int]]:
    """Yield module, name and line of each ``from module import name`` in ``file``, except in ``try`` statements."""
    may_fail = {id(each) for node in ast.walk(parsed(file)) if isinstance(node, ast.Try) for each in ast.walk(node)}
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom) and id(node) not in may_fail:
            base = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from ((module, alias.name, node.lineno) for alias in node.names)


class Core:
    """Source files of a megatron-core.

    Raises:
        FileNotFoundError: ``root`` has no megatron-core.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not (root / "megatron" / "core" / "__init__.py").is_file():
            raise FileNotFoundError(
                f"{root} has no megatron/core: pass a Megatron-LM checkout or a site-packages folder"
            )

    def body(self, module: str) -> list[ast.stmt]:
        """Return the statements of ``module``; empty if the file does not exist."""
        file = module_file(self.root.joinpath(*module.split(".")))
        return parsed(file.resolve()).body if file else []

    def has(self, module: str, name: str = "") -> bool:
        """Return whether ``module`` exists; with ``name``, whether it defines, imports or contains that name."""
        path = self.root.joinpath(*module.split("."), name)
        if module_file(path) is not None or path.is_dir():
            return True
        return bool(name) and not {name, "*", "__getattr__"}.isdisjoint(bound_names(self.body(module)))

    def find(self, module: str, paths: Iterable[str]) -> Definition | None:
        """Return the function or class at the first of ``paths`` (like ``Class.method``) that exists in ``module``."""
        for path in paths:
            body, found = self.body(module), None
            for name in path.split("."):
                found = next((n for n in statements(body) if isinstance(n, Definition) and n.name == name), None)
                body = found.body if found else []
            if found is not None:
                return found
        return None


class Check:
    """Compares two versions of the megatron-core definitions that the patch uses.

    Attributes:
        broken: A line for each breaking change.
        changed: A line for each change to review.
    """

    def __init__(self, ours: Core, other: Core) -> None:
        self.ours, self.other = ours, other
        self.broken: list[str] = []
        self.changed: list[str] = []
        for name in patched_modules():
            file = tree_file(name)
            assert file is not None
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            for module, imported, line in imports(file, package):
                if module.startswith(("megatron.core", "megatron.training")):
                    self._needs(module, imported, f"{file.relative_to(ROOT)}:{line}")
            if UPSTREAM in bound_names(parsed(file).body):
                self._extended(name, file)
        self._replaced()

    def __str__(self) -> str:
        sections = {"Would break:": self.broken, "Overridden code that changed, to review:": self.changed}
        lines = [line for title, texts in sections.items() if texts for line in (title, *map("  {}".format, texts), "")]
        return "\n".join([*lines, f"{len(self.broken)} would break, {len(self.changed)} to review"])

    def _needs(self, module: str, name: str, where: str) -> None:
        if self.ours.has(module, name) and not self.other.has(module, name):
            self.broken.append(f"removed: {module}.{name} ({where})")

    def _extended(self, module: str, file: Path) -> None:
        """Check the names that an extended module uses and overrides."""
        for node in ast.walk(parsed(file)):
            if name := _upstream_name(node):
                self._needs(module, name, f"{file.relative_to(ROOT)}:{node.lineno}")  # type: ignore[attr-defined]
        assigned: dict[str, ast.expr] = {}
        for node in statements(parsed(file).body):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                assigned[node.target.id] = node.value
            elif isinstance(node, ast.ClassDef):
                for base in node.bases:
                    names = _upstream_names(assigned.get(base.id, base) if isinstance(base, ast.Name) else base)
                    for method in statements(node.body if names else []):
                        if isinstance(method, ast.FunctionDef):
                            self._overrides(module, [f"{name}.{method.name}" for name in names], file, method)
            elif isinstance(node, Definition):
                self._overrides(module, [node.name], file, node)

    def _overrides(self, module: str, paths: list[str], file: Path, own: Definition | None = None) -> None:
        """Compare the overridden definition, at the first of ``paths`` that exists, between the two versions."""
        before, after = (core.find(module, paths) for core in (self.ours, self.other))
        what = f"{module}.{paths[-1]} ({file.relative_to(ROOT)}:{own.lineno if own else 1})"
        if before is None:
            return
        if after is None:
            self.broken.append(f"removed, so the override is never called: {what}")
        elif _parameters(before) != _parameters(after) and not _takes_any(own):
            self.broken.append(f"other parameters ({_parameters(before)} -> {_parameters(after)}): {what}")
        elif ast.dump(before) != ast.dump(after):
            self.changed.append(what)

    def _replaced(self) -> None:
        """Check the module that the patch replaces: compare its public definitions, and check all imports from it."""
        file = tree_file(REPLACED)
        assert file is not None
        before, after = (list(_public(core.body(REPLACED))) for core in (self.ours, self.other))
        for path in before:
            self._overrides(REPLACED, [path], file)
        self.changed += [f"new: {REPLACED}.{path}" for path in after if path not in before]
        # A unit test compares the names of star imports.
        there = {*bound_names(parsed(file).body), *bound_names(self.ours.body(REPLACED))}
        for source in sorted((self.other.root / "megatron").rglob("*.py")):
            if b"cuda_graphs" in source.read_bytes():
                where = source.relative_to(self.other.root)
                for module, name, _ in imports(source, ".".join(where.parts[:-1])):
                    if module == REPLACED and name not in there:
                        self.broken.append(f"not in the patch: {module}.{name}, which {where} imports")


def _upstream_name(node: ast.AST) -> str:
    """Return ``Name`` for the expression ``_upstream.Name``; empty for other expressions."""
    known = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == UPSTREAM
    return node.attr if known else ""  # type: ignore[attr-defined]


def _upstream_names(base: ast.expr) -> list[str]:
    """Return the names in a base class expression: ``_upstream.A`` or ``getattr(_upstream, "B", _upstream.A)``."""
    names = [_upstream_name(node) or getattr(node, "value", None) for node in ast.walk(base)]
    return [name for name in names if isinstance(name, str)]


def _parameters(definition: Definition) -> str:
    return "" if isinstance(definition, ast.ClassDef) else ast.unparse(definition.args)


def _takes_any(own: Definition | None) -> bool:
    """Return whether ``own`` is a function with ``*args`` and ``**kwargs``."""
    return isinstance(own, ast.FunctionDef) and bool(own.args.vararg and own.args.kwarg)


def _public(body: Iterable[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            names = (each.name for each in node.body if isinstance(each, ast.FunctionDef))
            yield from (f"{node.name}.{name}" for name in names if not name.startswith("_") or name == "__init__")
        elif isinstance(node, Definition) and not node.name.startswith("_"):
            yield node.name


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    try:
        core = find_core()
        if core is None:
            raise FileNotFoundError("megatron-core is not installed: install a tested version")
        check = Check(Core(Path(core.origin).parents[2]), Core(folder))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    print(check)
    return int(bool(check.broken))


if __name__ == "__main__":
    sys.exit(main())
