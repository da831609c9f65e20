"""Overlay megatron-core with this project's ``megatron/`` tree, whose files extend or add modules.

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
# Namespaces of extended modules after running megatron-core's file; None until then.
_originals: dict[str, SimpleNamespace | None] = {}


class Core(NamedTuple):
    """A megatron-core that an import could load: its version (None if unknown) and its ``__init__`` file."""

    version: str | None
    origin: str

    @property
    def is_patched(self) -> bool:
        """Whether ``tools/patch.py`` patched its files."""
        return Path(self.origin).with_name("transformer").joinpath("_cuda_graphs").is_dir()


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
    """Return the sorted names of all modules that this tree extends or adds."""
    files = (file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    names = (file.parent if file.name == "__init__.py" else file.with_suffix("") for file in files)
    return sorted(".".join(("megatron", *name.parts)) for name in names)


def ordinary_spec(name: str, path: Any) -> ModuleSpec | None:
    """Find the module ``name`` on ``path``, its parent's ``__path__``, ignoring this patch."""
    finders = (finder for finder in list(sys.meta_path) if hasattr(finder, "find_spec") and not _is_ours(finder))
    return next(filter(None, (finder.find_spec(name, path, None) for finder in finders)), None)


def _is_ours(finder: Any) -> bool:
    """Return whether ``finder`` is this patch's, even if this module was reloaded."""
    return type(finder).__name__ == OverlayFinder.__name__


def find_core() -> Core | None:
    """Find the megatron-core that an import would load, without importing it; None if there is none."""
    if "megatron.core" in sys.modules:
        spec = getattr(sys.modules["megatron.core"], "__spec__", None)  # tests may have a stub
    elif "megatron" in sys.modules:
        spec = ordinary_spec("megatron.core", getattr(sys.modules["megatron"], "__path__", None))
    else:
        namespace = importlib.util.find_spec("megatron")
        spec = namespace and ordinary_spec("megatron.core", namespace.submodule_search_locations)
    return None if spec is None or spec.origin is None else Core(_read_version(spec.origin), spec.origin)


@functools.cache
def _read_version(origin: str) -> str | None:
    file = Path(origin).with_name("package_info.py")
    return version_in(file.read_bytes()) if file.is_file() else None


def version_in(package_info: str | bytes) -> str | None:
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
    """Finds the modules that this tree extends or adds, unless megatron-core is untested or already patched."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        file = tree_file(fullname)
        core = find_core() if file else None
        if file is None or (core is not None and core.is_patched):
            return None
        spec = copy.copy(ordinary_spec(fullname, path))
        problem = untested_core()
        if problem is not None and switch() != "untested":
            if spec is None or fullname != ARGUMENTS:
                return None
            spec.loader = RefusingLoader(spec.loader, problem)
            return spec
        if problem is not None:
            _warn_of_patching(problem)
        if spec is None:
            return importlib.util.spec_from_file_location(fullname, file)
        if spec.origin != str(file):  # else a module of a package that this tree adds
            spec.loader = ExtensionLoader(spec.loader, file)
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
    """Runs megatron-core's file, then this tree's file ``what`` in the same namespace."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        _originals[name] = None
        super().exec_module(module)
        if _originals[name] is None:  # else another import hook found this loader, which ran both files
            _originals[name] = SimpleNamespace(**vars(module))
            exec(SourceFileLoader(name, str(self.what)).get_code(name) or "", vars(module))


def extend(name: str) -> Any:
    """Return megatron-core's own definitions of the module ``name``, which this tree extends.

    A file that extends a module sets ``_upstream = extend(__name__)`` after its imports. ``_upstream.Name`` stays
    megatron-core's ``Name`` when the file defines its own.

    Raises:
        ImportError: ``name`` is not an extended module, or megatron-core's file is still running.
    """
    if name not in _originals:
        raise ImportError(
            f"{name} was not loaded through the patch: call {__name__}.activate() before anything imports megatron, "
            "and remove the call of extend() if megatron-core lacks this module",
            name=name,
        )
    originals = _originals[name]
    if originals is None:
        raise ImportError(
            f"{name} is not fully imported yet, because of a circular import: call {__name__}.upstream in functions "
            "that use its definitions, not at import",
            name=name,
        )
    return originals


def upstream(name: str) -> Any:
    """Return megatron-core's own definitions of the module ``name``: the module itself unless this tree extends it."""
    module = importlib.import_module(name)
    return extend(name) if name in _originals else module


def is_patched(module: Any) -> bool:
    """Return whether ``module`` was loaded from this tree or a patched megatron-core."""
    core = find_core()
    ours = hasattr(module, "_upstream") or module.__file__ == str(tree_file(module.__name__))
    return ours or (core is not None and core.is_patched)


def switch() -> Literal["on", "off", "untested"]:
    """Return the setting in the environment variable ``MEGATRON_FSDP_CUDA_GRAPHS``."""
    return _SETTINGS.get(os.environ.get(SWITCH, "").strip().lower(), "on")


def is_active() -> bool:
    """Return whether the patch is on in this process."""
    return any(map(_is_ours, sys.meta_path)) and (switch() == "untested" or untested_core() is None)


def activate() -> None:
    """Turn the patch on in this process. torch calls this at the end of ``import torch``; further calls do nothing.

    Never raises. Warns if a module to patch is already imported, in which case the patch stays off, or if the
    environment variable ``MEGATRON_FSDP_CUDA_GRAPHS`` has an unknown value.
    """
    if any(map(_is_ours, sys.meta_path)):
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
