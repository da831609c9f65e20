"""Puts this project's ``megatron/`` tree in front of megatron-core: its files replace, extend or add modules.

torch calls ``activate`` at the end of ``import torch``, through its ``torch.backends`` entry points, and megatron-core
imports torch before anything else: so the patch is on before the first module that it changes is imported. ``activate``
registers one finder on ``sys.meta_path`` and imports nothing. CONTRIBUTING.md, "How the patch gets in front", has more.

The version of megatron-core is read from the files that an import would take, so a checkout ahead on ``sys.path`` is
judged by its own. A version that was not tested is imported unpatched. ``import torch`` never raises.
"""

import ast
import copy
import functools
import importlib.util
import inspect
import logging
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, NamedTuple

_PACKAGE = Path(__file__).resolve().parent
# An installed copy has the tree in a folder that no import statement can name, so that no file of it is two modules.
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
ARGUMENTS = "megatron.training.arguments"  # imported where a Megatron training starts

_logger = logging.getLogger(__name__)


class Core(NamedTuple):
    """A megatron-core: the version in its ``package_info`` (None if unreadable) and its ``__init__`` file."""

    version: str | None
    origin: str


def tree_file(name: str) -> Path | None:
    """Return this tree's file for the module ``name`` (such as ``megatron.a.b``), or None if it has none."""
    package, *parts = name.split(".")
    if package != "megatron" or len(parts) < 2 or parts[0] not in PACKAGES:
        return None
    return module_file(ROOT.joinpath(*parts))


def module_file(base: Path) -> Path | None:
    """Return the file of the module or package at ``base``, a path without a suffix, or None if there is none."""
    candidates = (base / "__init__.py", base.with_name(f"{base.name}.py"))
    return next((file for file in candidates if file.is_file()), None)


def patched_modules() -> list[str]:
    """Return the names of all modules that this tree replaces, extends or adds, sorted."""
    files = (file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    names = (file.parent if file.name == "__init__.py" else file.with_suffix("") for file in files)
    return sorted(".".join(("megatron", *name.parts)) for name in names)


def change(name: str) -> Literal["replaced", "extended", "added"]:
    """Return what this tree's file for the module ``name`` does to the megatron-core that imports take."""
    file, core = tree_file(name), find_core()
    if file is None:
        raise ValueError(f"the patch has no file for {name}")
    if is_extension(file):
        return "extended"
    there = core is not None and module_file(Path(core.origin).parents[2].joinpath(*name.split(".")))
    return "replaced" if there else "added"


@functools.cache
def is_extension(file: Path) -> bool:
    """Whether ``file`` imports ``extend`` from this module, to run on top of megatron-core's file."""
    return any(
        isinstance(node, ast.ImportFrom) and node.module == __name__ and "extend" in {each.name for each in node.names}
        for node in ast.parse(file.read_bytes()).body
    )


def ordinary_spec(name: str, path: Any) -> ModuleSpec | None:
    """Find the module ``name`` on ``path`` (the parent package's ``__path__``) as if this patch were not there."""
    finders = (finder for finder in list(sys.meta_path) if not isinstance(finder, OverlayFinder))
    return next(filter(None, (finder.find_spec(name, path) for finder in finders)), None)


def find_core() -> Core | None:
    """Find the megatron-core that imports take, without importing it; None if there is none."""
    if "megatron.core" in sys.modules:
        spec = getattr(sys.modules["megatron.core"], "__spec__", None)  # it may be a stand-in of a test
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
    """Return the version that the text of megatron-core's ``package_info`` says; None if it says none."""
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
    """Return what is wrong with the version of the megatron-core that imports take; None if it may be patched."""
    core = find_core()
    if core is None or core.version in TESTED_VERSIONS:
        return None
    return (
        f"megatron-fsdp-cuda-graphs was tested with megatron-core {', '.join(TESTED_VERSIONS)} only, and found "
        f"{core.version or 'an unknown version'} at {core.origin}"
    )


class OverlayFinder(MetaPathFinder):
    """Finds the modules that this tree replaces, extends or adds; none of a megatron-core that was not tested."""

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
    """Return megatron-core's spec of the module ``name`` with a loader that changes the module; None without one."""
    spec = copy.copy(ordinary_spec(name, path))
    if spec is None and kind is ExtensionLoader:
        raise ImportError(f"{what} extends {name}, and megatron-core has no such module", name=name)
    if spec is not None:
        spec.loader = kind(spec.loader, what)
    return spec


class _CoreLoader(Loader):
    """Loads megatron-core's file and changes the module; answers everything else as megatron-core's own loader."""

    def __init__(self, found: Any, what: Any) -> None:
        self.found, self.what = found, what

    def __getattr__(self, name: str) -> Any:
        if name == "found":  # while the loader is copied
            raise AttributeError(name)
        return getattr(self.found, name)

    def exec_module(self, module: Any) -> None:
        self.found.exec_module(module)


class RefusingLoader(_CoreLoader):
    """Lets ``validate_args`` of an untested megatron-core refuse graphs that need the patch; ``what`` says why."""

    def exec_module(self, module: Any) -> None:
        _warn(f"{self.what}. It is left unpatched, without CUDA graphs of sharded models. {REMEDY}")
        super().exec_module(module)
        validate_args = getattr(module, "validate_args", None)
        if validate_args is None:
            return

        @functools.wraps(validate_args)
        def refusing(args: Any, *others: Any, **named: Any) -> Any:
            validated = validate_args(args, *others, **named)
            sharded = [name for name in ("use_megatron_fsdp", "use_torch_fsdp2") if getattr(args, name, False)]
            if sharded and getattr(args, "cuda_graph_impl", "") == "transformer_engine":
                raise ValueError(
                    f"--{sharded[0].replace('_', '-')} with --cuda-graph-impl transformer_engine needs the patch, "
                    f"which is off: {self.what}. {REMEDY} Or set {SWITCH}=0 to try megatron-core's own graphs."
                )
            return validated

        module.validate_args = refusing


class ExtensionLoader(_CoreLoader):
    """Runs megatron-core's file, and then this tree's (``what``) in the same namespace.

    Attributes:
        originals: What the module held in between; None before.
    """

    originals: SimpleNamespace | None = None

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self.originals = SimpleNamespace(**vars(module))
        exec(SourceFileLoader(module.__name__, str(self.what)).get_code(module.__name__) or "", vars(module))
        self._refuse_stale_names(module)

    def _refuse_stale_names(self, module: ModuleType) -> None:
        """Raise ImportError if a circular import took a name of ``module`` that this tree's file replaced later."""
        now = vars(module)
        replaced = {id(value) for name, value in vars(self.originals).items() if now.get(name, value) is not value}
        stale = [
            f"{name} of {other}"
            for other, holder in list(sys.modules.items())
            if other.startswith("megatron.") and holder is not module
            for name, value in list(vars(holder).items())
            if id(value) in replaced and getattr(value, "__module__", "") == module.__name__
        ]
        if stale:
            raise ImportError(
                f"{', '.join(stale)} came from {module.__name__} before the patch replaced it (a circular import): "
                f"define it in {self.what} before the import that leads there",
                name=module.__name__,
            )


def extend(name: str) -> Any:
    """Return what megatron-core's file alone defines in the module ``name``, which this tree extends.

    A file that extends a module has ``_upstream = extend(__name__)`` after its imports: ``_upstream.Name`` is
    megatron-core's ``Name`` also after the file defines its own.

    Raises ImportError if ``name`` was not loaded as an extended module, or megatron-core's file is still running.
    """
    loader = _extension(sys.modules.get(name))
    if loader is None:
        raise ImportError(
            f"{name} was not loaded through the patch: call {__name__}.activate() before anything imports megatron",
            name=name,
        )
    if loader.originals is None:
        raise ImportError(
            f"megatron-core's file of {name} is still running and imports, in a circle, a module of the patch that "
            f"needs its definitions: call {__name__}.upstream where they are used, not when that module is imported",
            name=name,
        )
    return loader.originals


def upstream(name: str) -> Any:
    """Return megatron-core's own definitions in the module ``name``: the module itself unless this tree extends it."""
    module = importlib.import_module(name)
    return module if _extension(module) is None else extend(name)


def _extension(module: ModuleType | None) -> ExtensionLoader | None:
    """Return the loader of ``module``, if it is an extended one."""
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    return loader if isinstance(loader, ExtensionLoader) else None


def is_patched(module: Any) -> bool:
    """Whether ``module`` was loaded from this tree's file, or from megatron-core's and this tree's."""
    return _extension(module) is not None or getattr(module, "__file__", "") == str(tree_file(module.__name__))


def _find_classes_by_methods(getfile: Any) -> Any:
    """Return ``inspect.getfile`` that finds a class of a patched module in the file of its first method.

    Its module's ``__file__`` may be megatron-core's, or that of the public module that it is published by.
    """

    @functools.wraps(getfile)
    def wrapper(object: Any) -> str:
        module = sys.modules.get(getattr(object, "__module__", "")) if isinstance(object, type) else None
        if module is not None and is_patched(module):
            codes = (getattr(getattr(each, "__func__", each), "__code__", None) for each in vars(object).values())
            for code in filter(None, codes):
                if code.co_qualname.startswith(f"{object.__qualname__}."):
                    return code.co_filename
        return getfile(object)

    return wrapper


def switch() -> Literal["on", "off", "untested"]:
    """Return what the environment variable ``MEGATRON_FSDP_CUDA_GRAPHS`` says, in any usual spelling."""
    return _SETTINGS.get(os.environ.get(SWITCH, "").strip().lower(), "on")


def is_active() -> bool:
    """Whether the patch is on in this process."""
    registered = any(isinstance(finder, OverlayFinder) for finder in sys.meta_path)
    return registered and (switch() == "untested" or untested_core() is None)


def activate() -> None:
    """Turn the patch on in this process. torch calls this at the end of ``import torch``; once is enough.

    Warns, and never raises, where the patch stays off because a module that it replaces is imported already, and of an
    unknown value of the environment variable ``MEGATRON_FSDP_CUDA_GRAPHS``.
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
            f"the patch for CUDA graphs under Megatron-FSDP stays off, as {', '.join(loaded)} came from megatron-core "
            f"before. Import torch, or call {__name__}.activate(), before anything imports megatron."
        )
        return
    sys.meta_path.insert(0, OverlayFinder())
    inspect.getfile = _find_classes_by_methods(inspect.getfile)


@functools.cache
def _warn_of_patching(problem: str) -> None:
    _warn(
        f"{problem}. It is patched, as {SWITCH} is untested. In a checkout of this project `python -m "
        "tools.upstream_check FOLDER --against DIR` lists what may break, where FOLDER holds it and DIR a tested one; "
        "compare a short training with an eager one."
    )


def _warn(message: str) -> None:
    """Log a warning on one rank of a job."""
    if os.environ.get("RANK", "0") == "0":
        _logger.warning(message)
