"""The files of a Megatron-LM checkout with the patch in it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..overlay import ROOT, TESTED_VERSIONS, patched_modules, tree_file
from .splice import splice

OWN = __name__.partition(".")[0]  # this package, as imports name it
# Modules of this package that files of the patch import, and where they go.
MOVED = {
    "public_names": ("megatron.core.public_names", ROOT / "public_names.py"),
    "tensor_alias": ("megatron.core.tensor_alias", ROOT / "tensor_alias.py"),
    "collectives": ("megatron.core.collectives", ROOT / "collectives.py"),
    "allocator_check": ("megatron.core.allocator_check", ROOT / "allocator_check.py"),
}


@dataclass(frozen=True)
class File:
    """A file of the checkout.

    Attributes:
        path: Where it is, below the checkout.
        text: Its content with the patch.
        before: Its content without; None if it is new.
    """

    path: str
    text: str
    before: str | None


@dataclass(frozen=True)
class Series:
    """A part of the changes.

    Attributes:
        name: Of its folder.
        title: What it is about.
        folders: Files below ``megatron`` whose paths begin with one of these belong to it.
    """

    name: str
    title: str
    folders: tuple[str, ...]


SERIES = (
    Series(
        "1-engine",
        "Capture engine with hooks that run outside capture",
        (
            "core/transformer/_cuda_graphs/engine/",
            "core/transformer/_cuda_graphs/errors.py",
            "core/transformer/_cuda_graphs/__init__.py",
            "core/public_names.py",
            "core/tensor_alias.py",
        ),
    ),
    Series(
        "2-fsdp",
        "Megatron-FSDP beside per-layer CUDA graphs",
        (
            "core/distributed/",
            "core/optimizer/",
            "core/datasets/",
            "core/host_agreement.py",
            "core/rerun_state_machine.py",
            "core/utils.py",
        ),
    ),
    Series("3-local-graphs", "Local graphs, TECudaGraphHelper and their flags", ("core/", "training/")),
)


def files(checkout: Path) -> Iterator[File]:
    """Yield the files that the patch changes or adds.

    Args:
        checkout: It holds ``megatron/core``; it is read only.

    Raises:
        FileNotFoundError: it does not.
        ValueError: it is a version that the patch was not tested with.
    """
    _check_version(checkout)
    for target, source in MOVED.values():
        yield _file(checkout, target, source.read_text())
    for name in patched_modules():
        path = tree_file(name)
        assert path is not None
        text = path.read_text()
        yield _file(checkout, name, _without_overlay(text), path.name == "__init__.py", "= extend(__name__)" in text)


def series_of(path: str) -> Series:
    """Return the series of the file at ``path``, below the checkout."""
    below = path.removeprefix("megatron/")
    return next(series for series in SERIES if below.startswith(series.folders))


def _check_version(checkout: Path) -> None:
    info = checkout / "megatron" / "core" / "package_info.py"
    if not info.is_file():
        raise FileNotFoundError(f"{checkout} has no megatron/core: name a Megatron-LM checkout or a site-packages")
    parts = (re.search(rf"^{part} = (.+)$", info.read_text(), re.MULTILINE) for part in ("MAJOR", "MINOR", "PATCH"))
    version = ".".join(found[1].strip() if found else "?" for found in parts)
    if version not in TESTED_VERSIONS:
        raise ValueError(
            f"{checkout} has megatron-core {version}, and the patch was tested with {', '.join(TESTED_VERSIONS)} only: "
            "check out one of these"
        )


def _file(checkout: Path, name: str, text: str, is_package: bool = False, extends: bool = False) -> File:
    path = Path(*name.split("."), "__init__.py") if is_package else Path(*name.split(".")).with_suffix(".py")
    there = checkout / path
    before = there.read_text() if there.is_file() else None
    if extends and before is not None:
        text = splice(before, text)
    return File(str(path), text, before)


def _without_overlay(text: str) -> str:
    """Let imports of this package's modules name the places of those in the checkout."""
    text = text.replace(f"from {OWN}.overlay import extend\n", "")
    for module, (target, _) in MOVED.items():
        text = text.replace(f"from {OWN}.{module} import", f"from {target} import")
    if OWN in "\n".join(line for line in text.splitlines() if "import" in line):
        raise ValueError(f"a file of the patch imports {OWN} in a way that has no place in a checkout")
    return text
