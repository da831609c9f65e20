"""Lets ``git`` write patches."""

import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

from .contents import File
from .series import Patch

IDENTITY = ("-c", "user.name=Megatron-FSDP CUDA graphs", "-c", "user.email=patches@localhost")
NOTE = "Made from the overlay of megatron-fsdp-cuda-graphs by its command patch-series."


def write_series(patches: Iterable[tuple[Patch, list[File]]], output: Path) -> list[Path]:
    """Write the patches, in folders of their series, for ``git am`` in this order; return their paths.

    Args:
        patches: Each with the files that it changes or adds, on top of those before it.
        output: A folder, which is made; it must be empty.

    Raises:
        FileExistsError: it is not empty.
        subprocess.CalledProcessError: git failed.
    """
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty: name another folder for the patches")
    written = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        _git(scratch, "init", "--quiet")
        _commit(scratch, "megatron-core")
        for patch, files in patches:
            _put(scratch, {file.path: file.before for file in files if file.before is not None})
            _commit(scratch, "megatron-core's own files")
            _put(scratch, {file.path: file.text for file in files})
            _commit(scratch, patch.title, fill(patch.why, 72))
            target = (output / patch.folder).resolve()
            number = len(list(target.glob("*.patch"))) + 1
            _git(
                scratch, "format-patch", "--quiet", f"--start-number={number}", "--output-directory", str(target), "-1"
            )
            written.append(max(target.iterdir()))
    return written


def _put(root: Path, texts: dict[str, str]) -> None:
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def _commit(root: Path, title: str, *paragraphs: str) -> None:
    message = [option for text in (title, *paragraphs, NOTE) for option in ("--message", text)]
    _git(root, "add", "--all", "--force")
    _git(root, *IDENTITY, "commit", "--quiet", "--allow-empty", *message)


def _git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(root), "-c", "core.autocrlf=false", *arguments], check=True)
