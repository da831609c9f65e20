"""List the overridden definitions that differ between the installed megatron-core and another one.

    python -m tools.upstream_check FOLDER

FOLDER contains ``megatron/core``: a Megatron-LM checkout or a site-packages folder. Neither megatron-core is imported.
All public definitions of the module ``cuda_graphs`` count as overridden. The exit code is 1 if
FOLDER lacks an overridden definition, 2 if there is nothing to compare.
"""

import argparse
import ast
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from megatron_fsdp_cuda_graphs.overlay import find_core, module_file, patched_modules, tree_file

REPLACED = "megatron.core.transformer.cuda_graphs"  # by definitions in several files


def definitions(file: Path | None) -> dict[str, list[str]]:
    """Return the code of each top-level function and ``Class.method`` in ``file``; empty without a file."""
    found: dict[str, list[str]] = {}
    if file:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            for path, node in _functions(ast.parse(file.read_bytes(), str(file))):
                found.setdefault(path, []).append(ast.dump(node))
    return found


def _functions(parent: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the functions in ``parent`` with their paths, including those in branches, but not nested ones."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        else:
            yield from _functions(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)


def differences(ours: Path, other: Path) -> Iterator[tuple[str, str]]:
    """Yield ``(change, definition)`` for each overridden definition that was ``removed``, ``changed`` or is ``new``.

    Args:
        ours, other: Folders that contain ``megatron``.
    """
    for module in patched_modules():
        before, after = (definitions(module_file(root.joinpath(*module.split(".")))) for root in (ours, other))
        file = tree_file(module)
        assert file is not None
        if module == REPLACED:
            own = {path for path in before | after if "._" not in f".{path.removesuffix('__init__')}"}
        else:
            own = before.keys() & definitions(file)
        for path in sorted(own):
            if before.get(path) != after.get(path):
                what = "removed" if path not in after else "changed" if path in before else "new"
                yield what, f"{module}.{path}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    core = find_core()
    if core is None or not (folder / "megatron" / "core" / "__init__.py").is_file():
        missing = "megatron-core is not installed: install a tested version"
        if core is not None:
            missing = f"{folder} has no megatron/core: pass a Megatron-LM checkout or a site-packages folder"
        print(missing, file=sys.stderr)
        return 2
    found = list(differences(Path(core.origin).parents[2], folder))
    for line in found:
        print(*line)
    print(f"{len(found)} overridden definitions differ")
    return int(any(what == "removed" for what, _ in found))


if __name__ == "__main__":
    sys.exit(main())
