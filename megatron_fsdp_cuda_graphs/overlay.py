"""Overlay megatron-core with this project's ``megatron/`` tree, whose files replace, extend or add modules.

torch calls ``activate`` at the end of ``import torch``, through its ``torch.backends`` entry points. megatron-core
imports torch first, so the patch is on before any module that it changes. ``activate`` registers one finder on
``sys.meta_path`` and imports nothing. See "How the overlay works" in CONTRIBUTING.md.

The version of megatron-core is read from the files that an import would load, even from a checkout on
``sys.path``. An untested version stays unpatched. ``import torch`` never raises.
"""

import ast
import copy
import functools
import importlib.util
import logging
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, NamedTuple

_PACKAGE = Path(__file__).resolve().parent
# An installed copy's folder has no importable name, so no file can be imported as two modules.
_INSTALLED = _PACKAGE / "_overlay.d"
ROOT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.with_name("megatron")
PACKAGES = ("core", "training")
TESTED_VERSIONS = ("0.19.0", "0.19.1", "0.19.2")
SWITCH = "MEGATRON_FSDP_CUDA_GRAPHS"
_SETTINGS: dict[str, Literal["on", "off", "untested"]] = {
    **dict.fromkeys(("", "1", "true", "yes", "on"), "on"),
    **dict.fromkeys(("0", "false", "no", "off"), "off"),
    "untested": "untested",
}
REMEDY = (
    f"Install megatron-core=={TESTED_VERSIONS[-1]} (or check out that version of Megatron-LM), or set "
    f"{SWITCH}=untested to patch this one."
)
ARGUMENTS = "megatron.training.arguments"  # imported when a training run starts

_logger = logging.getLogger(__name__)


class Core(NamedTuple):
    """A megatron-core that an import could load: its version (None if unknown) and its ``__init__`` file."""

    version: str | None
    origin: str


def tree_file(name: str) -> Path | None:
    """Return this tree's file for the module ``name``, for example ``megatron.a.b``; None if there is none."""
    package, *parts = name.split(".")
    if package != "megatron" or len(parts) < 2 or parts[0] not in PACKAGES:
        return None
    return module_file(ROOT.joinpath(*parts))


def module_file(base: Path) -> Path | None:
    """Return the file of the module or package at ``base``, a path without suffix; None if there is none."""
    candidates = (base / "__init__.py", base.with_name(f"{base.name}.py"))
    return next((file for file in candidates if file.is_file()), None)


def patched_modules() -> list[str]:
    """Return the sorted names of all modules that this tree replaces, extends or adds."""
    files = (file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    names = (file.parent if file.name == "__init__.py" else file.with_suffix("") for file in files)
    return sorted(".".join(("megatron", *name.parts)) for name in names)


@functools.cache
def is_extension(file: Path) -> bool:
    """Return whether ``file`` extends megatron-core's file: it imports ``extend`` from this module."""
    return any(
        isinstance(node, ast.ImportFrom) and node.module == __name__ and "extend" in {each.name for each in node.names}
        for node in ast.parse(file.read_bytes()).body
    )


def ordinary_spec(name: str, path: Any) -> ModuleSpec | None:
    """Find the module ``name`` on ``path``, its parent's ``__path__``, ignoring this patch."""
    finders = (finder for finder in list(sys.meta_path) if not isinstance(finder, OverlayFinder))
    return next(filter(None, (finder.find_spec(name, path) for finder in finders)), None)


def find_core() -> Core | None:
    """Find the megatron-core that an import would load, without importing it; None if there is none."""
    if "megatron.core" in sys.modules:
        spec = getattr(sys.modules["megatron.core"], "__spec__", None)  # tests may have a stub
    elif "megatron" in sys.modules:
        spec = ordinary_spec("megatron.core", sys.modules["megatron"].__path__)
    else:
        namespace = importlib.util.find_spec("megatron")
        spec = namespace and ordinary_spec("megatron.core", namespace.submodule_search_locations)
    return None if spec is None or spec.origin is None else Core(_read_version(spec.origin), spec.origin)


@functools.cache
def _read_version(origin: str) -> str | None:
    file = Path(origin).with_name("package_info.py")
    return version_in(file.read_text()) if file.is_file() else None


def version_in(package_info: str) -> str | None:
    """Return the version in the source of megatron-core's ``package_info``; None if there is none."""
    values = {
        target.id: str(node.value.value)
        for node in ast.parse(package_info).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    try:
        return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format(**values)
    except KeyError:
        return None


def untested_core() -> str | None:
    """Return an error message for an untested megatron-core; None if it is tested or missing."""
    core = find_core()
    if core is None or core.version in TESTED_VERSIONS:
        return None
    return (
        f"megatron-fsdp-cuda-graphs is tested with megatron-core {', '.join(TESTED_VERSIONS)} only, and found "
        f"{core.version or 'an unknown version'} at {core.origin}"
    )


class OverlayFinder(MetaPathFinder):
    """Finds the modules that this tree replaces, extends or adds, unless megatron-core is untested."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith("megatron.") or fullname.split(".")[1] not in PACKAGES:
            return None
        file = tree_file(fullname)
        if file is None and fullname != ARGUMENTS:
            return None
        problem = untested_core()
        if problem is not None and switch() == "untested":
            _warn_of_patching(problem)
        elif problem is not None:
            return _spec_of(fullname, path, RefusingLoader, problem) if fullname == ARGUMENTS else None
        if file is None:
            return None
        if is_extension(file):
            return _spec_of(fullname, path, ExtensionLoader, file)
        locations = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=locations)


def _spec_of(name: str, path: Any, kind: "type[_CoreLoader]", what: Any) -> ModuleSpec | None:
    """Return megatron-core's spec of ``name``, its loader replaced by ``kind(loader, what)``; None if not found."""
    spec = copy.copy(ordinary_spec(name, path))
    if spec is None and kind is ExtensionLoader:
        raise ImportError(f"{what} extends {name}, which megatron-core lacks: remove its call of extend()", name=name)
    if spec is not None:
        spec.loader = kind(spec.loader, what)
    return spec


class _CoreLoader(Loader):
    """Loads megatron-core's file; subclasses then change the module. Delegates the rest to megatron-core's loader."""

    def __init__(self, found: Any, what: Any) -> None:
        self.found, self.what = found, what

    def __getattr__(self, name: str) -> Any:
        if name == "found":  # while the loader is copied
            raise AttributeError(name)
        return getattr(self.found, name)

    def exec_module(self, module: Any) -> None:
        self.found.exec_module(module)


class RefusingLoader(_CoreLoader):
    """Loader that makes ``validate_args`` of an untested megatron-core reject graphs; ``what`` is the reason."""

    def exec_module(self, module: Any) -> None:
        _warn(f"{self.what}. It is left unpatched, so models under FSDP get no CUDA graphs. {REMEDY}")
        super().exec_module(module)
        validate_args = getattr(module, "validate_args", None)
        if validate_args is None:
            return

        @functools.wraps(validate_args)
        def refusing(args: Any, *others: Any, **named: Any) -> Any:
            validated = validate_args(args, *others, **named)
            graphs = getattr(args, "cuda_graph_impl", "") == "transformer_engine"
            if graphs and getattr(args, "use_megatron_fsdp", False):
                raise ValueError(
                    "--use-megatron-fsdp with --cuda-graph-impl transformer_engine needs the patch, which is off: "
                    f"{self.what}. {REMEDY} Or set {SWITCH}=0 to try megatron-core's own graphs."
                )
            return validated

        module.validate_args = refusing


class ExtensionLoader(_CoreLoader):
    """Runs megatron-core's file, then this tree's file ``what`` in the same namespace.

    Attributes:
        originals: Namespace of the module after running megatron-core's file; None before that.
    """

    originals: SimpleNamespace | None = None

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self.originals = SimpleNamespace(**vars(module))
        exec(SourceFileLoader(module.__name__, str(self.what)).get_code(module.__name__) or "", vars(module))
        self._refuse_stale_names(module)

    def _refuse_stale_names(self, module: ModuleType) -> None:
        """Raise ImportError if a circular import bound a definition that this tree's file later replaced."""
        now = vars(module)
        replaced = {id(value) for name, value in vars(self.originals).items() if now.get(name, value) is not value}
        stale = [
            f"{other}.{name}"
            for other, holder in list(sys.modules.items())
            if other.startswith("megatron.") and holder is not module
            for name, value in list(vars(holder).items())
            if id(value) in replaced and getattr(value, "__module__", "") == module.__name__
        ]
        if stale:
            raise ImportError(
                f"{', '.join(stale)} is not the patch's definition, because of a circular import: define it in "
                f"{self.what} above the import that leads back to {module.__name__}",
                name=module.__name__,
            )


def extend(name: str) -> Any:
    """Return megatron-core's own definitions of the module ``name``, which this tree extends.

    A file that extends a module sets ``_upstream = extend(__name__)`` after its imports. ``_upstream.Name`` stays
    megatron-core's ``Name`` when the file defines its own.

    Raises:
        ImportError: ``name`` is not an extended module, or megatron-core's file is still running.
    """
    loader = _extension(sys.modules.get(name))
    if loader is None:
        raise ImportError(
            f"{name} was not loaded through the patch: call {__name__}.activate() before anything imports megatron",
            name=name,
        )
    if loader.originals is None:
        raise ImportError(
            f"{name} is not fully imported yet, because of a circular import: call {__name__}.upstream in functions "
            "that use its definitions, not at import",
            name=name,
        )
    return loader.originals


def upstream(name: str) -> Any:
    """Return megatron-core's own definitions of the module ``name``: the module itself unless this tree extends it."""
    module = importlib.import_module(name)
    return module if _extension(module) is None else extend(name)


def _extension(module: ModuleType | None) -> ExtensionLoader | None:
    """Return the loader of ``module`` if this tree extends it."""
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    return loader if isinstance(loader, ExtensionLoader) else None


def is_patched(module: Any) -> bool:
    """Return whether ``module`` was loaded from this tree."""
    return _extension(module) is not None or getattr(module, "__file__", "") == str(tree_file(module.__name__))


def switch() -> Literal["on", "off", "untested"]:
    """Return the setting in the environment variable ``MEGATRON_FSDP_CUDA_GRAPHS``."""
    return _SETTINGS.get(os.environ.get(SWITCH, "").strip().lower(), "on")


def is_active() -> bool:
    """Return whether the patch is on in this process."""
    registered = any(isinstance(finder, OverlayFinder) for finder in sys.meta_path)
    return registered and (switch() == "untested" or untested_core() is None)


def activate() -> None:
    """Turn the patch on in this process. torch calls this at the end of ``import torch``; further calls do nothing.

    Never raises. Warns if a module to patch is already imported, in which case the patch stays off, or if the
    environment variable ``MEGATRON_FSDP_CUDA_GRAPHS`` has an unknown value.
    """
    if any(isinstance(finder, OverlayFinder) for finder in sys.meta_path):
        return
    value = os.environ.get(SWITCH, "")
    if value.strip().lower() not in _SETTINGS:
        _warn(
            f"{SWITCH}={value} is ignored: set it to 1 (patch on, the default), 0 (patch off) or untested (patch on, "
            "with any version of megatron-core)"
        )
    if switch() == "off":
        return
    loaded = [name for name in sorted(sys.modules) if name.startswith("megatron.") and tree_file(name)]
    if loaded and (switch() == "untested" or untested_core() is None):
        _warn(
            f"the patch for CUDA graphs under Megatron-FSDP stays off, because {', '.join(loaded)} was imported before "
            f"it. Import torch, or call {__name__}.activate(), before anything imports megatron."
        )
        return
    sys.meta_path.insert(0, OverlayFinder())


@functools.cache
def _warn_of_patching(problem: str) -> None:
    _warn(
        f"{problem}. It is patched because {SWITCH}=untested is set. `python -m tools.upstream_check FOLDER`, in a "
        "checkout of this project with a tested megatron-core, lists overridden code that differs; FOLDER contains the "
        "untested one. Compare a short training with an eager one."
    )


def _warn(message: str) -> None:
    """Log a warning on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        _logger.warning(message)
