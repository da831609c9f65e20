"""Puts this tree's files in front of megatron-core's modules of the same path.

torch calls ``activate`` at the end of ``import torch``, through its ``torch.backends`` entry-point group, and
``megatron.core`` and ``megatron.training`` import torch before anything else: so the patch is on before the first
module that it replaces is asked for, whichever of the two a program imports first. ``activate`` registers one finder
on ``sys.meta_path`` and imports nothing. For ``megatron.a.b`` the finder answers with this tree's ``a/b.py`` if there
is one; every other import goes on as usual.

Off: ``MEGATRON_FSDP_CUDA_GRAPHS=0`` in the environment leaves megatron-core as it is. With
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` torch calls no entry point at all; call ``activate`` before importing megatron.

Refused: with the patch on, importing any part of a megatron-core whose version is not in ``TESTED_VERSIONS`` raises
ImportError, an installed one and a Megatron-LM checkout alike. The version is read from the files that the import
would take, not from package metadata, so a checkout ahead on ``sys.path`` is judged by its own version. ``import
torch`` never raises for it.
"""

import ast
import importlib
import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent
PACKAGES = ("core", "training")  # of megatron-core; other folders of this tree are the patch's own
TESTED_VERSIONS = ("0.19.2",)
SWITCH = "MEGATRON_FSDP_CUDA_GRAPHS"
UPSTREAM_PREFIX = "_upstream_"


class Core(NamedTuple):
    """A megatron-core: the version in its ``package_info`` (None if unreadable) and its ``__init__`` file."""

    version: str | None
    origin: str


def tree_file(name: str) -> Path | None:
    """Return this tree's file for the module ``name`` (such as ``megatron.a.b``), or None if it has none."""
    package, *parts = name.split(".")
    if package != "megatron" or len(parts) < 2 or parts[0] not in PACKAGES:
        return None
    base = ROOT.joinpath(*parts)
    candidates = (base / "__init__.py", base.with_name(f"{base.name}.py"))
    return next((file for file in candidates if file.is_file()), None)


def patched_modules() -> list[str]:
    """Return the names of all modules that this tree replaces or adds, sorted."""
    files = (file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    names = (file.parent if file.name == "__init__.py" else file.with_suffix("") for file in files)
    return sorted(".".join(("megatron", *name.parts)) for name in names)


def ordinary_spec(name: str, path: Any) -> ModuleSpec | None:
    """Find the module ``name`` on ``path`` (the parent package's ``__path__``) as if this patch were not there."""
    for finder in list(sys.meta_path):
        if not isinstance(finder, OverlayFinder) and (spec := finder.find_spec(name, path)) is not None:
            return spec
    return None


def has_upstream(name: str) -> bool:
    """Whether megatron-core has a module ``name`` of its own behind this tree's. Imports the parent package."""
    return ordinary_spec(name, importlib.import_module(name.rpartition(".")[0]).__path__) is not None


def find_core() -> Core | None:
    """Find the megatron-core that imports take, without importing it. None if there is none."""
    spec = _core_spec()
    return None if spec is None or spec.origin is None else Core(_read_version(spec), spec.origin)


def _core_spec() -> ModuleSpec | None:
    if "megatron.core" in sys.modules:
        return sys.modules["megatron.core"].__spec__
    if "megatron" in sys.modules:
        return ordinary_spec("megatron.core", sys.modules["megatron"].__path__)
    spec = importlib.util.find_spec("megatron")
    return None if spec is None else ordinary_spec("megatron.core", spec.submodule_search_locations)


def _read_version(core: ModuleSpec) -> str | None:
    info = ordinary_spec("megatron.core.package_info", core.submodule_search_locations)
    get_source = getattr(info and info.loader, "get_source", None)
    if info is None or get_source is None:
        return None
    values = {
        target.id: str(node.value.value)
        for node in ast.parse(get_source(info.name) or "").body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    try:
        return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format(**values)
    except KeyError:
        return None


class OverlayFinder(MetaPathFinder):
    """Finds the modules that this tree replaces or adds, and megatron-core's own behind them."""

    def __init__(self) -> None:
        self._accepted: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith("megatron.") or fullname.split(".")[1] not in PACKAGES:
            return None
        self._refuse_untested(fullname)
        parent, _, leaf = fullname.rpartition(".")
        if leaf.startswith(UPSTREAM_PREFIX):
            return _upstream_spec(fullname, f"{parent}.{leaf.removeprefix(UPSTREAM_PREFIX)}", path)
        file = tree_file(fullname)
        if file is None:
            return None
        locations = [str(file.parent)] if file.name == "__init__.py" else None
        loader = PatchLoader(fullname, str(file))
        return importlib.util.spec_from_file_location(
            fullname, file, loader=loader, submodule_search_locations=locations
        )

    def _refuse_untested(self, fullname: str) -> None:
        spec = _core_spec()
        if spec is None or spec.origin is None or spec.origin in self._accepted:
            return
        version = _read_version(spec)
        if version not in TESTED_VERSIONS:
            known = ", ".join(TESTED_VERSIONS)
            raise ImportError(
                f"megatron-fsdp-cuda-graphs patches megatron-core {known} and was tested with no other version; "
                f"found {version or 'an unknown version'} at {spec.origin}. Nothing was patched. Install "
                f"megatron-core=={TESTED_VERSIONS[-1]} (or check out that version of Megatron-LM), or set {SWITCH}=0 "
                "to use megatron-core without the patch.",
                name=fullname,
                path=spec.origin,
            )
        self._accepted.add(spec.origin)


class PatchLoader(SourceFileLoader):
    """Loads a file of this tree; refuses one whose names were taken from megatron-core's before it defined them."""

    def __init__(self, fullname: str, path: str) -> None:
        super().__init__(fullname, path)
        self.early: dict[str, Any] | None = None

    def exec_module(self, module: ModuleType) -> None:
        self.early = {}
        super().exec_module(module)
        early, self.early = self.early, None
        mixed = sorted(name for name, value in early.items() if vars(module).get(name, value) is not value)
        if mixed:
            raise ImportError(
                f"{module.__name__} replaces {', '.join(mixed)}, but a module that it imports took megatron-core's own "
                "first (a circular import). Define the names before that import.",
                name=module.__name__,
                path=self.path,
            )


class UpstreamLoader(Loader):
    """Loads megatron-core's own module through the loader it was found with, under its public name."""

    def __init__(self, found: ModuleSpec, loader: Loader) -> None:
        self.found = found
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(self.found)

    def exec_module(self, module: ModuleType) -> None:
        # Before the first statement runs: classes and functions take their __module__ from here.
        module.__name__ = self.found.name
        self.loader.exec_module(module)

    def get_source(self, fullname: str) -> str | None:
        get_source = getattr(self.loader, "get_source", None)
        return get_source(self.found.name) if get_source else None


def _upstream_spec(alias: str, name: str, path: Any) -> ModuleSpec | None:
    found = ordinary_spec(name, path)
    if tree_file(name) is None or found is None or found.loader is None or found.origin is None:
        return None
    return importlib.util.spec_from_file_location(alias, found.origin, loader=UpstreamLoader(found, found.loader))


def _public_name(name: str) -> str:
    """Return the name under which the module ``name`` is imported, also if it runs as ``python -m``."""
    if name == "__main__" and (spec := sys.modules[name].__spec__) is not None:
        name = spec.name
    if not name.startswith("megatron."):
        raise ImportError(f"{name} is no megatron.* module: import a file of the patch as megatron.*", name=name)
    return name


def _alias(name: str) -> str:
    """Return the name under which the import system keeps megatron-core's own module ``name``."""
    parent, _, leaf = name.rpartition(".")
    return f"{parent}.{UPSTREAM_PREFIX}{leaf}"


def upstream(name: str) -> ModuleType:
    """Return megatron-core's own module called ``name``; a file of this tree passes its own ``__name__``.

    Behind a file of this tree it is loaded once, by the import system, under an alias. Its classes and functions keep
    ``name`` as their ``__module__``, so they pickle under the public name. A tool that reads a class through its
    ``__module__`` (``inspect.getsource``, ``typing.get_type_hints``) therefore looks into the patched file: define
    such a class there. Where no file of this tree stands in front, or the patch is off, it is the module that
    ``import`` gives.

    Raises ImportError if megatron-core has no such module, or if ``name`` is not a ``megatron.*`` name.
    """
    name = _public_name(name)
    if tree_file(name) is None or not is_active():
        return importlib.import_module(name)
    alias = _alias(name)
    try:
        return importlib.import_module(alias)
    except ModuleNotFoundError as error:
        if error.name != alias:
            raise
        raise ImportError(f"megatron-core has no module {name}", name=name) from None


def extend(name: str) -> ModuleType:
    """Let the patched module ``name`` answer for every name of megatron-core's own that it does not define.

    A file of this tree calls ``extend(__name__)`` before it defines anything, and gets megatron-core's own module
    back. Names are looked up when they are asked for, so a module-level variable of megatron-core is always the live
    one; assigning to it on the patched module does not reach megatron-core's functions. ``from name import *`` gives
    the public names of both.

    Raises ImportError as ``upstream`` does, and when ``name`` was not loaded through the patch.
    """
    module, public = sys.modules[name], _public_name(name)
    loader = module.__spec__.loader if module.__spec__ else None
    if not isinstance(loader, PatchLoader):
        raise ImportError(f"{name} was not loaded through the patch: call {__name__}.activate() first", name=name)
    alias = _alias(public)

    def missing(attribute: str) -> Any:
        original = sys.modules.get(alias)
        try:
            value = getattr(original, attribute)
        except AttributeError:
            if attribute == "__all__" and original is not None:
                return [public_name for public_name in listed() if not public_name.startswith("_")]
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}") from None
        if loader.early is not None:
            loader.early[attribute] = value
        return value

    def listed() -> list[str]:
        return sorted({*vars(module), *vars(sys.modules[alias])})

    # Set before megatron-core's module runs: what it imports may import the patched one again.
    module.__getattr__ = missing  # type: ignore[method-assign]
    module.__dir__ = listed  # type: ignore[method-assign]
    return upstream(name)


def is_active() -> bool:
    """Whether the patch is on in this process."""
    return any(isinstance(finder, OverlayFinder) for finder in sys.meta_path)


def activate() -> None:
    """Turn the patch on in this process. torch calls this at the end of ``import torch``; once is enough.

    Does nothing if the environment variable ``MEGATRON_FSDP_CUDA_GRAPHS`` is ``0``. Raises ValueError if it is
    anything but ``0`` or ``1``, and ImportError if a module that the patch replaces is imported already.
    """
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1"):
        raise ValueError(f"{SWITCH}={switch}: set it to 1 (patch on, the default) or 0 (patch off)")
    if switch == "0" or is_active():
        return
    loaded = [name for name in sorted(sys.modules) if name.startswith("megatron.") and tree_file(name)]
    if loaded:
        raise ImportError(
            f"{', '.join(loaded)} came from megatron-core before the patch was on. Import torch, or call "
            f"{__name__}.activate(), before anything imports megatron; or set {SWITCH}=0 to do without the patch.",
            name=loaded[0],
        )
    sys.meta_path.insert(0, OverlayFinder())
