"""What pyproject.toml cannot say: where the patch's ``megatron/`` tree goes, and where metadata is built."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
TREE = "megatron"

# Metadata that setuptools leaves here would be found by any Python started in this folder: torch of another environment
# would call an entry point that is not installed there, and `import torch` would fail.
METADATA = ROOT / "build"
METADATA.mkdir(exist_ok=True)
# Modules that an earlier build left would be installed too.
shutil.rmtree(METADATA / "lib", ignore_errors=True)


class BuildWithTree(build_py):
    """Copies the tree into the package as data, beside megatron-core and never over it.

    The folder's name has a dot, so no import statement reaches it: only the finder of ``overlay.py`` loads its files,
    each under its one name ``megatron.*``. An editable installation uses the tree where it is.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for file in self._tree():
                self.mkpath(str(Path(self._target(file)).parent))
                self.copy_file(file, self._target(file))

    def get_source_files(self) -> list[str]:
        """List what a source distribution takes."""
        return [*super().get_source_files(), *self._tree()]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """List what is installed."""
        return [*super().get_outputs(include_bytecode), *map(self._target, self._tree())]

    def _tree(self) -> list[str]:
        files = (file for file in (ROOT / TREE).rglob("*") if file.is_file() and file.suffix != ".pyc")
        return sorted(str(file.relative_to(ROOT)) for file in files)

    def _target(self, file: str) -> str:
        return str(Path(self.build_lib, "megatron_fsdp_cuda_graphs", "_overlay.d", Path(file).relative_to(TREE)))


setup(cmdclass={"build_py": BuildWithTree}, options={"egg_info": {"egg_base": METADATA.name}})
