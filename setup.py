"""Install the ``megatron/`` tree as package data, and write metadata outside of the source folder."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
TREE = "megatron"

# Any Python started in this folder would find metadata here: the torch of a different environment would call an entry
# point that is not installed there, and `import torch` would fail.
METADATA = ROOT / "build"
METADATA.mkdir(exist_ok=True)
# Otherwise modules of an earlier build would also be installed.
shutil.rmtree(METADATA / "lib", ignore_errors=True)


class BuildWithTree(build_py):
    """Copies the tree into the package as data, so that megatron-core's files are never overwritten.

    The folder's name has a dot, so that no import statement can load a file under a second name: only the finder of
    ``overlay.py`` loads the files, as ``megatron.*``. An editable installation uses the tree in the source folder.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for file in self._tree():
                self.mkpath(str(Path(self._target(file)).parent))
                self.copy_file(file, self._target(file))

    def get_source_files(self) -> list[str]:
        """Return the files of a source distribution."""
        return [*super().get_source_files(), *self._tree()]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return the installed files."""
        return [*super().get_outputs(include_bytecode), *map(self._target, self._tree())]

    def _tree(self) -> list[str]:
        files = (file for file in (ROOT / TREE).rglob("*") if file.is_file() and file.suffix != ".pyc")
        return sorted(str(file.relative_to(ROOT)) for file in files)

    def _target(self, file: str) -> str:
        return str(Path(self.build_lib, "megatron_fsdp_cuda_graphs", "_overlay.d", Path(file).relative_to(TREE)))


setup(cmdclass={"build_py": BuildWithTree}, options={"egg_info": {"egg_base": METADATA.name}})
