"""The installed patch, under the real torch: every way to install it, and the processes that a training starts.

megatron-core is a miniature ahead on the path, so that no test waits for the real one to be imported.
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

from tests.unit_tests.package.fake_core import PATCHED_LAYERS, ROOT, core_files, write

NAME = "megatron_fsdp_cuda_graphs"
PACKAGES = Path(torch.__file__).parents[1]


@dataclass(frozen=True)
class Installation:
    """An installed copy of this project, whose tree also replaces the miniature's ``megatron.core.layers``.

    Attributes:
        python: The interpreter to run.
        source: The copy of the project that was installed.
        site: Where the files went; the folder that holds ``megatron_fsdp_cuda_graphs`` or points to it.
        tree: The patch's files for ``megatron.*`` that an import is expected to use.
        path: What PYTHONPATH must hold, in order.
    """

    python: Path
    source: Path
    site: Path
    tree: Path
    path: tuple[Path, ...]

    def run(self, *arguments: str, folder: Path | None = None, **environment: str) -> str:
        """Run Python, in ``folder`` if given, and return what it printed; AssertionError if it fails."""
        inherited = {k: v for k, v in os.environ.items() if k not in ("MEGATRON_FSDP_CUDA_GRAPHS", "PYTHONPATH")}
        variables = {**inherited, "PYTHONPATH": os.pathsep.join(map(str, self.path)), **environment}
        command = [str(self.python), *map(dedent, arguments)]
        done = subprocess.run(
            command, cwd=folder or self.source.parent, env=variables, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def copy_of_the_project(folder: Path) -> Path:
    source = folder / "source"
    for tree in ("megatron", NAME):
        shutil.copytree(ROOT / tree, source / tree, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, source)
    # an earlier installation from this folder leaves modules that the project no longer has
    stale = {f"build/lib/{NAME}/removed.py": ""}
    return write(source, {"megatron/core/layers.py": PATCHED_LAYERS, **stale})


def environment_with_torch(folder: Path) -> Path:
    """Make a virtual environment that borrows torch and setuptools; return its interpreter."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    borrowed = dict.fromkeys([str(PACKAGES), str(Path(setuptools.__file__).parents[1])])  # this torch is found first
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
    """Build a wheel or a source distribution; return the file."""
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


# The environment in which tests run is an editable installation.
@pytest.fixture(
    params=[
        "regular",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("editable", "target", "wheel", "sdist")),
    ]
)
def installation(request, installed) -> Installation:
    return installed(request.param)


@pytest.fixture
def regular(installed) -> Installation:
    return installed("regular")


class TestEveryInstallation:
    def test_it_patches_without_a_word_from_the_program(self, installation):
        code = """
            import inspect, megatron.core.layers as layers, torch
            print(inspect.getsourcefile(layers.Linear), layers.Linear.graphed)
        """
        assert installation.run("-c", code) == f"{installation.tree}/core/layers.py True"

    def test_its_tree_holds_every_file_of_the_project(self, installation):
        modules = {file.relative_to(installation.tree) for file in installation.tree.rglob("*.py")}
        expected = {
            file.relative_to(installation.source / "megatron") for file in installation.source.rglob("megatron/**/*.py")
        }
        assert modules == expected

    def test_no_file_of_its_tree_has_a_second_name(self, installation):
        code = f"""
            import importlib
            for name in ("core", "_overlay", "_overlay.d", "_overlay.d.core"):
                try:
                    importlib.import_module(f"{NAME}.{{name}}.layers")
                    raise AssertionError(name)
                except ModuleNotFoundError:
                    pass
        """
        installation.run("-c", code)

    def test_it_puts_no_file_where_megatron_core_keeps_its_own(self, installation):
        assert not (installation.site / "megatron").exists()

    def test_a_python_of_another_environment_does_not_find_it_in_the_folder_of_the_project(self, installation):
        assert not list(importlib.metadata.distributions(name=NAME, path=[str(installation.source)]))


def test_uninstalled_it_leaves_nothing_and_megatron_core_as_it_was(tmp_path):
    installation = install("regular", tmp_path)
    code = "import torch, megatron.core.layers as layers; print(hasattr(layers.Linear, 'graphed'))"
    assert installation.run("-c", code) == "True"
    pip = [sys.executable, "-m", "pip", "--python", str(installation.python)]
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "megatron-fsdp-cuda-graphs"], check=True, timeout=600)
    assert [path.name for path in installation.site.iterdir()] == ["borrowed.pth"]
    # torch's own folder, which is borrowed, names the entry point of the installation that runs these tests
    assert installation.run("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False"


class TestContainer:
    """An environment with a build of torch from before its release, as NVIDIA's containers have."""

    VERSION = "2.11.0a0+eb65b36914.nv26.2"

    @pytest.mark.parametrize("options", [[], ["--no-deps"]], ids=["plain", "no-deps"])
    def test_pip_keeps_its_torch(self, tmp_path, options):
        source = copy_of_the_project(tmp_path)
        core = write(tmp_path / "core", core_files())
        python = environment_with_torch(tmp_path / "environment")
        metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {self.VERSION}\n"
        write(site_packages(python), {f"torch-{self.VERSION}.dist-info/METADATA": metadata})
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-build-isolation"]
        done = subprocess.run([*pip, *options, str(source)], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == "Successfully installed megatron-fsdp-cuda-graphs-0.2.0"
        site = site_packages(python)
        installation = Installation(python, source, site, site / NAME / "_overlay.d", (core,))
        code = """
            import importlib.metadata, torch
            from megatron.core.layers import Linear
            print(importlib.metadata.version("torch"), Linear.graphed)
        """
        assert installation.run("-c", code) == f"{self.VERSION} True"


class TestAutoload:
    @pytest.mark.parametrize("value", ["true", " Off ", "maybe"])
    def test_torchrun_starts_whatever_the_switch_is(self, regular, value):
        usage = regular.run("-m", "torch.distributed.run", "--help", MEGATRON_FSDP_CUDA_GRAPHS=value)
        assert usage.startswith("usage: ")

    def test_the_patch_is_on_when_torch_is_imported_first(self, regular):
        code = "import torch, megatron.core.layers; print(megatron.core.layers.Linear.graphed)"
        assert regular.run("-c", code) == "True"

    def test_turned_off_the_patch_waits_for_a_call_of_activate(self, regular):
        code = f"""
            import torch
            from {NAME}.overlay import activate, is_active
            print(is_active())
            activate()
            import megatron.core.layers as layers
            print(layers.Linear.graphed)
        """
        assert regular.run("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False\nTrue"


class TestChildProcesses:
    def test_torchrun_ranks_are_patched(self, regular, tmp_path):
        source = """
            import os
            from megatron.core.layers import Linear
            with open(os.environ["RANK"], "w") as file:
                file.write(str(Linear.graphed))
        """
        script = write(tmp_path, {"rank.py": source}) / "rank.py"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        regular.run(*launch, str(script), folder=tmp_path, OMP_NUM_THREADS="1")
        assert [(tmp_path / rank).read_text() for rank in "01"] == ["True", "True"]

    def test_a_process_that_torch_multiprocessing_spawns_takes_a_class_of_a_patched_module(self, regular, tmp_path):
        script = """
            import pathlib
            import torch.multiprocessing

            def child(index, file, cls):
                import megatron.core.layers as layers
                file.write_text(str((cls is layers.Linear, cls.graphed)))

            if __name__ == "__main__":
                from megatron.core.layers import Linear
                torch.multiprocessing.spawn(child, (pathlib.Path("found"), Linear))
        """
        regular.run(str(write(tmp_path, {"main.py": script}) / "main.py"), folder=tmp_path)
        assert (tmp_path / "found").read_text() == "(True, True)"
