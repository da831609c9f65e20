"""Run code in subprocesses with the real overlay and stubs of megatron-core, torch and the patch."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = tuple(ROOT / "megatron_fsdp_cuda_graphs" / f"{name}.py" for name in ("__init__", "overlay"))

# Calls the patch's entry point at its end, as torch's autoload does.
TORCH = "from megatron_fsdp_cuda_graphs.overlay import activate\nactivate()\n"

LAYERS = """
    LIMIT = 1

    def limit():
        return LIMIT

    class Linear:
        pass

    class Norm:
        pass
"""

PATCHED_LAYERS = """
    from megatron_fsdp_cuda_graphs.overlay import extend

    _upstream = extend(__name__)

    class Linear(_upstream.Linear):
        graphed = True

        def replay(self):
            pass
"""


def write(folder: Path, files: Mapping[str, str]) -> Path:
    """Write ``files`` (relative path to source) under ``folder``, and return ``folder``."""
    for path, source in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(source))
    return folder


def package_info(version: str) -> str:
    """Return the source of megatron-core's ``package_info`` for a version."""
    major, minor, patch, suffix = re.findall(r"(\d+)\.(\d+)\.(\d+)(.*)", version)[0]
    return f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = {suffix!r}\n"


def core_files(version: str = "0.19.2") -> dict[str, str]:
    """Return the files of a megatron-core with one patched and one unpatched module."""
    return {
        # Imports torch first, as megatron-core does.
        "megatron/core/__init__.py": "import torch\nimport megatron.core.utils\n",
        "megatron/core/utils.py": "",
        "megatron/core/package_info.py": package_info(version),
        "megatron/core/layers.py": LAYERS,
        "megatron/core/plain.py": "from megatron.core.layers import Linear\n",
    }


@dataclass(frozen=True)
class Sandbox:
    """Folders to import from: ``site`` with stubs of megatron-core and torch, and ``patch`` with the overlay."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "Sandbox":
        sandbox = cls(folder)
        write(sandbox.site, {**core_files(), "torch/__init__.py": TORCH})
        write(sandbox.patch, {"core/layers.py": PATCHED_LAYERS})
        for file in PACKAGE:
            shutil.copy(file, sandbox.patch.parent)
        return sandbox

    @property
    def site(self) -> Path:
        return self.folder / "site"

    @property
    def patch(self) -> Path:
        return self.folder / "patch" / "megatron_fsdp_cuda_graphs" / "_overlay.d"

    def run(
        self, *arguments: str, ahead: tuple[Path, ...] = (), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python without site-packages, with the folders ``ahead`` first on the path."""
        path = os.pathsep.join(map(str, (*ahead, self.site, self.patch.parents[1])))
        inherited = {k: v for k, v in os.environ.items() if k not in ("MEGATRON_FSDP_CUDA_GRAPHS", "PYTHONPATH")}
        return subprocess.run(
            [sys.executable, "-S", *arguments],
            cwd=self.folder,
            env={**inherited, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=600,
        )

    def output(self, code: str, ahead: tuple[Path, ...] = (), **environment: str) -> str:
        """Run ``code``, which must succeed, with the folders ``ahead`` on its path; return its output."""
        done = self.run("-c", dedent(code), ahead=ahead, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def error(self, code: str, ahead: tuple[Path, ...] = (), **environment: str) -> str:
        """Run ``code``, which must raise, with the folders ``ahead`` on its path; return its last line of output."""
        done = self.run("-c", dedent(code), ahead=ahead, **environment)
        assert done.returncode == 1, done.stdout
        return done.stderr.strip().splitlines()[-1]
