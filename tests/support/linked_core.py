"""Create a copy of the installed megatron-core: links to its files, except for some edited files."""

import os
import shutil
from pathlib import Path

from megatron_fsdp_cuda_graphs.overlay import find_core


def installed() -> Path:
    """Return the folder of the installed ``megatron/core``."""
    core = find_core()
    assert core is not None
    return Path(core.origin).parents[2]


def linked_core(folder: Path) -> Path:
    """Create the links under ``folder``, and return ``folder``."""
    for package in ("core", "training"):
        shutil.copytree(
            installed() / "megatron" / package,
            folder / "megatron" / package,
            copy_function=os.symlink,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    return folder


def change(folder: Path, name: str, *edits: tuple[str, str]) -> None:
    """Replace a link with an edited copy. Each of ``edits`` is an old text, which must occur, and its replacement."""
    path = folder / name
    text = path.read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    path.unlink()
    path.write_text(text)
