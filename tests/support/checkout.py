"""Makes a git repository of the installed megatron-core's files, in the place of a Megatron-LM checkout.

python tests/support/checkout.py FOLDER
"""

import shutil
import subprocess
import sys
from pathlib import Path

from megatron_fsdp_cuda_graphs.overlay import find_core


def main(folder: Path) -> None:
    """Make the repository, with one commit."""
    core = find_core()
    assert core is not None
    megatron = Path(core.origin).parents[1]
    shutil.copytree(megatron, folder / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".gitignore").write_text("__pycache__\n")
    for arguments in (
        ("init", "--quiet"),
        ("add", "--all", "--force"),
        ("-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "--message", "megatron-core"),
        ("tag", "megatron-core"),
    ):
        subprocess.run(["git", "-C", str(folder), *arguments], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
