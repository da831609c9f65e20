"""The files of a Megatron-LM checkout with the patches in it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_fsdp_cuda_graphs.overlay import TESTED_VERSIONS, patched_modules, tree_file, version_in
from tools.upstream_check.sources import imported_from

from .narrow import narrowed, with_sorted_imports
from .series import SERIES, Patch
from .source import Source, parsed
from .splice import splice

OWN = "megatron_fsdp_cuda_graphs"


@dataclass(frozen=True)
class File:
    """A file of the checkout.

    Attributes:
        path: Where it is, below the checkout.
        text: Its content with a patch.
        before: Its content without; None if it is new.
    """

    path: str
    text: str
    before: str | None


def patches(checkout: Path) -> Iterator[tuple[Patch, list[File]]]:
    """Yield each patch with the files that it changes or adds, on top of those before it.

    Args:
        checkout: It holds ``megatron/core``; it is read only.

    Raises:
        FileNotFoundError: it does not.
        ValueError: it is a version that the patch was not tested with; or there is no ruff.
    """
    _check_version(checkout)
    tree = _Tree(checkout)
    for patch in SERIES:
        before = dict(tree.texts)
        tree.apply(patch)
        yield (
            patch,
            [
                File(tree.path(name), text, before.get(name, tree.theirs[name]))
                for name, text in sorted(tree.texts.items())
                if text != before.get(name, tree.theirs[name])
            ],
        )


class _Tree:
    """The modules that the patches change or add.

    Attributes:
        theirs: megatron-core's text of each; None of those that are added.
        texts: The text of those that are changed or added so far.
    """

    def __init__(self, checkout: Path) -> None:
        self._files = {name: tree_file(name) for name in patched_modules()}
        ours = {name: _without_overlay(file.read_text()) for name, file in self._files.items() if file is not None}
        self._ours = narrowed(ours)
        found = {name: checkout / self.path(name) for name in self._files}
        self.theirs = {name: file.read_text() if file.is_file() else None for name, file in found.items()}
        self.texts: dict[str, str] = {}
        self._changed: dict[str, set[str]] = {}  # definitions, by extended module
        self._whole: set[str] = set()
        known = {name: text for name, text in self.theirs.items() if text is not None}
        ordered = with_sorted_imports(known)
        self._have_sorted_imports = {name for name, text in known.items() if text == ordered[name]}

    def path(self, name: str) -> str:
        """Return where a module is, below the checkout."""
        file, path = self._files[name], Path(*name.split("."))
        return str(path / "__init__.py" if file is not None and file.name == "__init__.py" else path.with_suffix(".py"))

    def apply(self, patch: Patch) -> None:
        """Change and add what ``patch`` does, and what that imports."""
        roots = tuple(f"megatron/{root}" for root in patch.roots)
        todo = [name for name in self._files if self.path(name).startswith(roots) and name not in self._whole]
        self._whole.update(todo)
        for name, definitions in patch.changes.items():
            self._changed.setdefault(name, set()).update(definitions)
            todo.append(name)
        while todo:
            name = todo.pop()
            self.texts[name] = self._text(name)
            todo += self._imported_by(name)
        for name in self._files:
            if self.theirs[name] is not None and not self._extends(name) and name not in self._whole:
                text = self._partly(name)
                if text != self.theirs[name]:
                    self.texts[name] = text
        self.texts |= with_sorted_imports(
            {name: text for name, text in self.texts.items() if name in self._have_sorted_imports}
        )

    def _extends(self, name: str) -> bool:
        return self.theirs[name] is not None and "= extend(__name__" in self._ours[name]

    def _text(self, name: str) -> str:
        theirs = self.theirs[name]
        if theirs is None or not self._extends(name):
            return self._ours[name]
        return splice(theirs, self._ours[name], None if name in self._whole else self._changed[name])

    def _imported_by(self, name: str) -> Iterator[str]:
        """Yield the modules that have to be there, or to define more, for the imports of the module ``name``."""
        is_package = self.path(name).endswith("__init__.py")
        for module, imported in imports(self.texts[name], name if is_package else name.rpartition(".")[0]):
            for other in (module, f"{module}.{imported}"):
                parents = [".".join(other.split(".")[:end]) for end in range(3, other.count(".") + 2)]
                for each in parents:
                    if each in self._files and self.theirs[each] is None and each not in self._whole:
                        self._whole.add(each)
                        yield each
            if module in self._files and self._extends(module) and module not in self._whole:
                theirs = self.theirs[module] or ""
                known = self._changed.setdefault(module, set())
                ours = Source(self._ours[module]).names.keys() - Source(theirs).names.keys()
                if imported in ours - known:
                    known.add(imported)
                    yield module

    def _partly(self, name: str) -> str:
        """Return a module that is replaced as a whole later: what files that are there define, it imports from them."""
        package = name.rpartition(".")[0]
        nodes = [node for node in parsed(self._ours[name]).body if isinstance(node, ast.ImportFrom)]
        there = [node for node in nodes if imported_from(node, package) in self._whole and node.names[0].name != "*"]
        return splice(self.theirs[name] or "", "\n".join(map(ast.unparse, there)))


@cache
def imports(text: str, package: str) -> tuple[tuple[str, str], ...]:
    """Return the modules that a file imports from, at any place, with each name."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.ImportFrom):
            found += ((imported_from(node, package), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            found += ((alias.name, "") for alias in node.names)
    return tuple(found)


def _check_version(checkout: Path) -> None:
    info = checkout / "megatron" / "core" / "package_info.py"
    if not info.is_file():
        raise FileNotFoundError(f"{checkout} has no megatron/core: name a Megatron-LM checkout or a site-packages")
    version = version_in(info.read_text())
    if version not in TESTED_VERSIONS:
        raise ValueError(
            f"{checkout} has megatron-core {version or 'of an unknown version'}, and the patch was tested with "
            f"{', '.join(TESTED_VERSIONS)} only: check out one of these"
        )


def _without_overlay(text: str) -> str:
    """Let imports of this package's modules name the places of those in the checkout."""
    text = text.replace(f"from {OWN}.overlay import extend\n", "")
    if OWN in "\n".join(line for line in text.splitlines() if "import" in line):
        raise ValueError(f"a file of the patch imports {OWN} in a way that has no place in a checkout")
    return text
