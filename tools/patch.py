"""Write this project as one patch for ``git am`` in a Megatron-LM checkout.

    python -m tools.patch CHECKOUT | git -C CHECKOUT am

The patch contains all files that this project adds. It appends each file that extends one of megatron-core's to it,
after a line that saves the namespace as ``_upstream``, so the checkout runs the same code as the overlay, in the same
order. This command does not change CHECKOUT. A patched checkout does not need this project.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_fsdp_cuda_graphs import __version__
from megatron_fsdp_cuda_graphs.overlay import ROOT, TESTED_VERSIONS, version_in

TITLE = "CUDA graphs under Megatron-FSDP"
BODY = f"Made from megatron-fsdp-cuda-graphs {__version__} by tools/patch.py."
SEAM = """

# CUDA graphs under Megatron-FSDP: the code below replaces names above, which stay available in `_upstream`.
# ruff: noqa: E402
from types import SimpleNamespace

_upstream = SimpleNamespace(**globals())
"""
_IMPORT = re.compile(r"^from megatron_fsdp_cuda_graphs\.overlay import extend\n", re.MULTILINE)
_EXTEND = re.compile(r"^_upstream(: Any)? = extend\(__name__\)\n+", re.MULTILINE)


def patched_files(checkout: Path) -> dict[str, str]:
    """Return the text of each changed or added file by its path relative to ``checkout``.

    Raises:
        FileNotFoundError: ``checkout`` has no megatron-core.
        ValueError: Its version is untested.
    """
    info = checkout / "megatron" / "core" / "package_info.py"
    if not info.is_file():
        raise FileNotFoundError(f"{checkout} has no megatron/core: pass a Megatron-LM checkout")
    version = version_in(info.read_text())
    if version not in TESTED_VERSIONS:
        raise ValueError(f"{checkout} has megatron-core {version}: use one of {', '.join(TESTED_VERSIONS)}")
    texts = {}
    for file in sorted(ROOT.rglob("*")):
        if file.is_file() and file.suffix != ".pyc":
            path, text = f"megatron/{file.relative_to(ROOT)}", file.read_text()
            if (checkout / path).is_file():
                text = (checkout / path).read_text() + SEAM + _EXTEND.sub("", _IMPORT.sub("", text))
            if "megatron_fsdp_cuda_graphs.overlay" in text:
                raise ValueError(
                    f"{path} imports megatron_fsdp_cuda_graphs.overlay, which a patched checkout does not have: "
                    "import only `extend`, on a line of its own, which this tool removes"
                )
            texts[path] = text
    return texts


def make_patch(checkout: Path) -> bytes:
    """Return the patch.

    Raises:
        CalledProcessError: git failed.
        FileNotFoundError, ValueError: See ``patched_files``.
    """
    texts = patched_files(checkout)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)

        def git(*arguments: str) -> bytes:
            identity = ("-c", f"user.name={TITLE}", "-c", "user.email=patch@localhost", "-c", "core.autocrlf=false")
            return subprocess.run(["git", *identity, *arguments], cwd=scratch, check=True, capture_output=True).stdout

        def commit(files: dict[str, str], *message: str) -> None:
            for path, text in files.items():
                (scratch / path).parent.mkdir(parents=True, exist_ok=True)
                (scratch / path).write_text(text)
            git("add", "--all", "--force")
            git("commit", "--quiet", "--allow-empty", *(f"--message={paragraph}" for paragraph in message))

        git("init", "--quiet")
        commit({path: (checkout / path).read_text() for path in texts if (checkout / path).is_file()}, "megatron-core")
        commit(texts, TITLE, BODY)
        return git("format-patch", "--stdout", "-1")


def main(arguments: list[str] | None = None) -> int:
    """Print the patch; return 0, or 2 if the checkout is unsuitable."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    try:
        patch = make_patch(parser.parse_args(arguments).checkout)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    sys.stdout.buffer.write(patch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
