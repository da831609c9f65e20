"""Test that no file imports from a higher layer (bottom up: leaves, engine, te, public module).

Files are parsed, not imported. Imports inside functions count, except in the tests of import cycles.
"""

import ast
import graphlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[4]
TRANSFORMER = "megatron.core.transformer"
PACKAGE = f"{TRANSFORMER}._cuda_graphs"
MEGATRON_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"

# Lowest first. A file may import files of its own layer and of lower layers. A folder stands for all of its files.
LAYERS = (
    {
        f"{PACKAGE}.{name}"
        for name in (
            *("errors", "inputs", "hooks", "flags", "evaluation_mode", "launches"),
            *("replacements", "snapshot"),
        )
    },
    {f"{PACKAGE}.engine"},
    {f"{PACKAGE}.layer_graph", f"{PACKAGE}.agreement"},
    {f"{TRANSFORMER}.module"},
    {f"{PACKAGE}.te"},
    {f"{TRANSFORMER}.cuda_graphs"},
)


def _path_of(name: str) -> Path:
    return REPOSITORY / Path(*name.split(".")).with_suffix(".py")


def _files() -> list[str]:
    root = _path_of(PACKAGE).with_suffix("")
    files = [path for path in root.rglob("*.py") if path.name != "__init__.py"]
    return sorted(
        [".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in files]
        + [f"{TRANSFORMER}.module", f"{TRANSFORMER}.cuda_graphs"]
    )


FILES = _files()
FSDP_FOLDER = _path_of(MEGATRON_FSDP).with_suffix("")
FSDP_FILES = [
    ".".join((MEGATRON_FSDP, *path.relative_to(FSDP_FOLDER).with_suffix("").parts))
    for path in FSDP_FOLDER.rglob("*.py")
    if path.name != "__init__.py"
]


@cache
def _parsed(name: str) -> ast.Module:
    return ast.parse(_path_of(name).read_text())


def _nodes(tree: ast.AST, inside_functions: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _nodes(node, inside_functions)


def _imports(name: str, *, inside_functions: bool = True) -> set[str]:
    """Return the files in ``FILES`` that the module ``name`` imports, except ``cuda_graphs``.

    Functions import ``cuda_graphs`` when they are called, so that patches of its names take effect.
    """
    return _all_imports(name, inside_functions=inside_functions) & set(FILES) - {f"{TRANSFORMER}.cuda_graphs"}


@cache
def _all_imports(name: str, *, inside_functions: bool) -> set[str]:
    found: set[str] = set()
    for node in _nodes(_parsed(name), inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")[: -node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return found


def _group(name: str) -> str:
    """Return the subpackage of a module, or the module itself if it is in none."""
    folder = name.rpartition(".")[0]
    return name if folder in (PACKAGE, TRANSFORMER) else folder


def _rank(name: str) -> int:
    ranks = [rank for rank, layer in enumerate(LAYERS) if _group(name) in layer]
    assert ranks, f"{name} belongs to no layer of LAYERS"
    return ranks[0]


def _higher(files: list[str], rank: Callable[[str], int]) -> list[str]:
    """Return a message for each import from a higher layer; ``rank`` returns the layer of a file."""
    return [f"{name} imports {i}" for name in files for i in sorted(_imports(name)) if _rank(i) > rank(name)]


def test_files_import_no_higher_layer() -> None:
    assert FILES and not _higher(FILES, _rank)


def test_megatron_fsdp_imports_leaves_and_engine_only() -> None:
    assert FSDP_FILES and not _higher(FSDP_FILES, lambda name: _rank(f"{PACKAGE}.engine"))


def test_fsdp_passes_and_buffers_import_downward() -> None:
    def rank(name: str) -> int:
        return 1 if f"{MEGATRON_FSDP}._graphs." in name else 2 if name.endswith(("fsdp_hooks", ".megatron_fsdp")) else 0

    imports = [
        (name, imported)
        for name in FSDP_FILES
        for imported in _all_imports(name, inside_functions=True) & set(FSDP_FILES)
    ]
    assert imports and not [(name, imported) for name, imported in imports if rank(imported) > rank(name)]


def test_no_files_import_each_other_in_a_circle() -> None:
    """Check the patch, the package and the tools, including imports under ``TYPE_CHECKING``."""
    folders = [REPOSITORY / name for name in ("megatron", "megatron_fsdp_cuda_graphs", "tools")]
    paths = [path.relative_to(REPOSITORY) for folder in folders for path in folder.rglob("*.py")]
    names = {".".join(path.with_suffix("").parts) for path in paths if path.name != "__init__.py"}
    imports = {name: _all_imports(name, inside_functions=False) & names for name in names}
    assert sum(map(len, imports.values())) > len(names)
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError with the files in a cycle


def test_files_import_while_te_wrappers_are_imported() -> None:
    """Check that no file imports models at import time, because TransformerEngine's wrappers import cuda_graphs.

    If models are imported before these wrappers finish importing, they silently run without TransformerEngine.
    """
    prefixes = ("megatron.core.models", "megatron.core.extensions")
    origins = [(name, i) for name in (*FILES, *FSDP_FILES) for i in _all_imports(name, inside_functions=False)]
    assert origins and not [(name, origin) for name, origin in origins if origin.startswith(prefixes)]
