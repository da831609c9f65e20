"""Test every way to install the patch, with the real torch.

A miniature replaces megatron-core, which is slow to import.
"""

import functools
import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest
import setuptools
import torch

from tests.support.sample import mostly_long
from tests.unit_tests.package.fake_core import PATCHED_LAYERS, ROOT, core_files, write

NAME = "megatron_fsdp_cuda_graphs"
PACKAGES = Path(torch.__file__).parents[1]


@dataclass(frozen=True)
class Installation:
    """Installed copy of this project that also patches the miniature's ``megatron.core.layers``.

    Attributes:
        python: The interpreter.
        source: The copy of the project's source tree.
        site: The folder that contains ``megatron_fsdp_cuda_graphs`` or a link to it.
        tree: The folder of the installed ``megatron`` modules.
        path: Entries for PYTHONPATH.
    """

    python: Path
    source: Path
    site: Path
    tree: Path
    path: tuple[Path, ...]

    def run(self, *arguments: str, **environment: str) -> str:
        """Run Python and return its output.

        Raises:
            AssertionError: Python exited with an error.
        """
        inherited = {k: v for k, v in os.environ.items() if k not in ("MEGATRON_FSDP_CUDA_GRAPHS", "PYTHONPATH")}
        variables = {**inherited, "PYTHONPATH": os.pathsep.join(map(str, self.path)), **environment}
        command = [str(self.python), *map(dedent, arguments)]
        done = subprocess.run(
            command, cwd=self.source.parent, env=variables, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def copy_of_the_project(folder: Path) -> Path:
    source = folder / "source"
    for tree in ("megatron", NAME):
        shutil.copytree(ROOT / tree, source / tree, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, source)
    # left over from an earlier installation
    stale = {f"build/lib/{NAME}/removed.py": ""}
    return write(source, {"megatron/core/layers.py": PATCHED_LAYERS, **stale})


def environment_with_torch(folder: Path) -> Path:
    """Create a virtual environment that uses this environment's torch and setuptools, and return its interpreter."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    borrowed = dict.fromkeys([str(PACKAGES), str(Path(setuptools.__file__).parents[1])])  # torch's folder first
    (site_packages(python) / "borrowed.pth").write_text("\n".join(borrowed))
    return python


def site_packages(python: Path) -> Path:
    return next(python.parents[1].glob("lib/python*/site-packages"))


def install(kind: str, folder: Path) -> Installation:
    source = copy_of_the_project(folder)
    core = write(folder / "core", core_files())
    python = environment_with_torch(folder / "environment")
    site = folder / "target" if kind == "target" else site_packages(python)
    options = {"editable": ["--editable"], "target": ["--target", str(site)]}.get(kind, [])
    what = built(kind, source) if kind in ("wheel", "sdist") else source
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    subprocess.run([*pip, *offline, *options, str(what)], check=True, timeout=600, stdin=subprocess.DEVNULL)
    tree = source / "megatron" if kind == "editable" else site / NAME / "_overlay.d"
    return Installation(python, source, site, tree, (core, site) if kind == "target" else (core,))


def built(kind: str, source: Path) -> Path:
    """Build a wheel or source distribution and return its path."""
    folder = source.parent / "dist"
    wheel = ["-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    arguments = {
        "wheel": [*wheel, str(folder), "."],
        "sdist": ["setup.py", "--quiet", "sdist", "--dist-dir", str(folder)],
    }
    subprocess.run([sys.executable, *arguments[kind]], cwd=source, check=True, timeout=600, stdin=subprocess.DEVNULL)
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Callable[[str], Installation]:
    return functools.cache(lambda kind: install(kind, tmp_path_factory.mktemp(kind)))


# The environment that runs the tests is an editable installation.
@pytest.fixture(params=mostly_long(["regular", "editable", "target", "wheel", "sdist"], "regular"))
def installation(request, installed) -> Installation:
    return installed(request.param)


def test_installation_patches_without_user_code(installation):
    code = """
        import megatron.core.layers as layers, torch
        print(layers.Linear.replay.__code__.co_filename, layers.Linear.graphed)
    """
    assert installation.run("-c", code) == f"{installation.tree}/core/layers.py True"


def test_installation_has_every_file(installation):
    modules = {file.relative_to(installation.tree) for file in installation.tree.rglob("*.py")}
    source = installation.source / "megatron"
    assert modules == {file.relative_to(source) for file in source.rglob("*.py")}
    assert not (installation.site / "megatron").exists()  # megatron-core's own folder


def test_source_folder_has_no_metadata(installation):
    assert not list(importlib.metadata.distributions(name=NAME, path=[str(installation.source)]))


@pytest.mark.long
def test_uninstalling_restores_megatron_core(tmp_path):
    installation = install("regular", tmp_path)
    code = "import torch, megatron.core.layers as layers; print(hasattr(layers.Linear, 'graphed'))"
    assert installation.run("-c", code) == "True"
    pip = [sys.executable, "-m", "pip", "--python", str(installation.python)]
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "megatron-fsdp-cuda-graphs"], check=True, timeout=600)
    assert [path.name for path in installation.site.iterdir()] == ["borrowed.pth"]
    # The shared folder contains the entry point of the installation that runs the tests.
    assert installation.run("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False"


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--no-deps"]], ids=["plain", "no-deps"])
def test_pip_keeps_the_torch_of_a_container(tmp_path, options):
    version = "2.11.0a0+eb65b36914.nv26.2"  # a build before the release, as in NVIDIA's containers
    source = copy_of_the_project(tmp_path)
    core = write(tmp_path / "core", core_files())
    python = environment_with_torch(tmp_path / "environment")
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    write(site_packages(python), {f"torch-{version}.dist-info/METADATA": metadata})
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--quiet", *options, str(source)], check=True, timeout=600)
    site = site_packages(python)
    installation = Installation(python, source, site, site / NAME / "_overlay.d", (core,))
    code = """
        import importlib.metadata, torch
        from megatron.core.layers import Linear
        print(importlib.metadata.version("torch"), Linear.graphed)
    """
    assert installation.run("-c", code) == f"{version} True"


@pytest.mark.long
def test_torchrun_ranks_are_patched(installed, tmp_path):
    source = """
        import os
        from megatron.core.layers import Linear
        with open(os.environ["RANK"], "w") as file:
            file.write(str(Linear.graphed))
    """
    script = write(tmp_path, {"rank.py": f"import os\nos.chdir({str(tmp_path)!r})\n{dedent(source)}"}) / "rank.py"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    installed("regular").run(*launch, str(script), OMP_NUM_THREADS="1")
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["True", "True"]
