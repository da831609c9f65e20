"""Lets ``git`` write patches."""

import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .contents import SERIES, File, series_of

IDENTITY = ("-c", "user.name=Megatron-FSDP CUDA graphs", "-c", "user.email=patches@localhost")
NOTE = "Made from the overlay of megatron-fsdp-cuda-graphs by its command patch-series."


def write_series(files: Iterable[File], output: Path) -> list[Path]:
    """Write a folder of patches for each series, for ``git am`` in this order; return the patches.

    Args:
        files: What the checkout is to have.
        output: A folder, which is made; it must be empty.

    Raises:
        FileExistsError: it is not empty.
        subprocess.CalledProcessError: git failed.
    """
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty: name another folder for the patches")
    by_series: dict[str, list[File]] = {series.name: [] for series in SERIES}
    for file in files:
        by_series[series_of(file.path).name].append(file)
    patches = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        _git(scratch, "init", "--quiet")
        for file in (each for group in by_series.values() for each in group if each.before is not None):
            _put(scratch, file.path, file.before or "")
        _commit(scratch, "megatron-core")
        for series in SERIES:
            group = by_series[series.name]
            new, changed = ([file for file in group if (file.before is None) is is_new] for is_new in (True, False))
            for part, what in ((new, "new files"), (changed, "changed files")):
                for file in part:
                    _put(scratch, file.path, file.text)
                if part:
                    _commit(scratch, f"{series.title}: {what}")
            count = sum(map(bool, (new, changed)))
            target = output / series.name
            _git(scratch, "format-patch", "--quiet", "--output-directory", str(target.resolve()), f"-{count}")
            patches += sorted(target.iterdir())
    return patches


def _put(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def _commit(root: Path, title: str) -> None:
    _git(root, "add", "--all", "--force")
    _git(root, *IDENTITY, "commit", "--quiet", "--allow-empty", "--message", title, "--message", NOTE)


def _git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(root), "-c", "core.autocrlf=false", *arguments], check=True)
