"""Python modules of a folder, read and not imported."""

import ast
import functools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_fsdp_cuda_graphs.overlay import module_file

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Sources:
    """The modules below a folder."""

    root: Path

    def __post_init__(self) -> None:
        """Make sure that it does.

        Raises:
            FileNotFoundError: it does not.
        """
        if not (self.root / "megatron" / "core" / "__init__.py").is_file():
            raise FileNotFoundError(f"{self.root} has no megatron/core: name a Megatron-LM checkout or a site-packages")

    def file(self, name: str) -> Path | None:
        """Return the file of the module ``name``; None if there is none."""
        return module_file(self.root.joinpath(*name.split(".")))

    def has_module(self, name: str) -> bool:
        """Whether ``name`` is a module or a folder of modules."""
        return self.file(name) is not None or self.root.joinpath(*name.split(".")).is_dir()

    def files(self) -> Iterator[Path]:
        """Yield the files of megatron's packages."""
        for package in ("core", "training"):
            yield from sorted((self.root / "megatron" / package).rglob("*.py"))

    def tree(self, name: str) -> ast.Module | None:
        """Return the syntax tree of the module ``name``; None if there is no such file."""
        path = self.file(name)
        return None if path is None else parsed(path)

    def has(self, name: str, attribute: str) -> bool:
        """Whether the module ``name`` has ``attribute``: defined, imported, or a module below it."""
        tree = self.tree(name)
        if self.has_module(f"{name}.{attribute}"):
            return True
        if tree is None:
            return False
        names = set(bound_names(tree.body))
        return attribute in names or "__getattr__" in names or "*" in names

    def definition(self, name: str, path: str) -> Definition | None:
        """Return the function or class at ``path`` (such as ``Class.method``) in the module ``name``."""
        tree = self.tree(name)
        found: ast.Module | Definition | None = tree
        for part in path.split("."):
            if found is None:
                return None
            inside = (each for each in statements(found.body) if isinstance(each, Definition))
            found = next((each for each in inside if each.name == part), None)
        return found if isinstance(found, Definition) else None


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file, or of what it links to."""
    return _parsed(path.resolve())


@functools.cache
def _parsed(path: Path) -> ast.Module:
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
        return ast.parse(path.read_bytes(), str(path))


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of ``body`` and of the branches in it that run on import or in a class."""
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With | ast.For):
                yield from statements(getattr(statement, field, ()))
        for handler in getattr(statement, "handlers", ()):
            yield from statements(handler.body)


def bound_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that ``body`` defines or imports; ``*`` for an import of all names."""
    for statement in statements(body):
        if isinstance(statement, Definition):
            yield statement.name
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))


def imported_from(statement: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module that ``statement`` in ``package`` imports from."""
    if not statement.level:
        return statement.module or ""
    parts = package.split(".")[: len(package.split(".")) - statement.level + 1]
    return ".".join([*parts, *([statement.module] if statement.module else [])])
