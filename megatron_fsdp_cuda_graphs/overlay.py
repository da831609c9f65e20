"""Puts this tree's files in front of megatron-core's modules of the same path: they replace, extend or add modules.

torch calls ``activate`` at the end of ``import torch``, through its ``torch.backends`` entry-point group, and
``megatron.core`` and ``megatron.training`` import torch before anything else: so the patch is on before the first
module that it changes is asked for. ``activate`` registers one finder on ``sys.meta_path`` and imports nothing. What an
extended module is, and how the patch is turned off: CONTRIBUTING.md, "How the patch gets in front".

The version of megatron-core is read from the files that an import would take, not from package metadata, so a checkout
ahead on ``sys.path`` is judged by its own. One that was not tested is imported unpatched: jobs without graphs run as if
the patch were not installed. ``import torch`` never raises.
"""

import ast
import copy
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from operator import attrgetter
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, Literal, NamedTuple

_PACKAGE = Path(__file__).resolve().parent
# An installed copy has the tree in a folder that no import statement can name, so that no file of it is two modules.
_INSTALLED = _PACKAGE / "_overlay.d"
ROOT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.with_name("megatron")
PACKAGES = ("core", "training")
TESTED_VERSIONS = ("0.19.0", "0.19.1", "0.19.2")
SWITCH = "MEGATRON_FSDP_CUDA_GRAPHS"
SETTINGS: dict[str, Literal["on", "off", "untested"]] = {
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


def ordinary_spec(name: str, path: Any) -> ModuleSpec | None:
    """Find the module ``name`` on ``path`` (the parent package's ``__path__``) as if this patch were not there."""
    for finder in list(sys.meta_path):
        if not isinstance(finder, OverlayFinder) and (spec := finder.find_spec(name, path)) is not None:
            return spec
    return None


def change(name: str) -> Literal["replaced", "extended", "added"]:
    """Return what this tree's file for the module ``name`` does. Imports the parent package."""
    file = tree_file(name)
    if file is None:
        raise ValueError(f"the patch has no file for {name}")
    parent = name.rpartition(".")[0]
    if tree_file(parent) is not None and change(parent) == "added":
        return "added"
    if ordinary_spec(name, importlib.import_module(parent).__path__) is None:
        return "added"
    return "extended" if _extends(file) else "replaced"


def _extends(file: Path) -> bool:
    """Whether ``file`` imports ``extend`` from this module, to run on top of megatron-core's file."""
    return any(
        isinstance(statement, ast.ImportFrom)
        and (statement.module or "").endswith("overlay")
        and any(alias.name == "extend" for alias in statement.names)
        for statement in ast.parse(file.read_bytes()).body
    )


def find_core() -> Core | None:
    """Find the megatron-core that imports take, without importing it. None if there is none."""
    spec = _core_spec()
    return None if spec is None or spec.origin is None else Core(_read_version(spec), spec.origin)


def _core_spec() -> ModuleSpec | None:
    if "megatron.core" in sys.modules:
        return getattr(sys.modules["megatron.core"], "__spec__", None)  # it may be a stand-in of a test
    if "megatron" in sys.modules:
        return ordinary_spec("megatron.core", sys.modules["megatron"].__path__)
    spec = importlib.util.find_spec("megatron")
    return None if spec is None else ordinary_spec("megatron.core", spec.submodule_search_locations)


def _read_version(core: ModuleSpec) -> str | None:
    info = ordinary_spec("megatron.core.package_info", core.submodule_search_locations)
    get_source = getattr(info and info.loader, "get_source", None)
    return None if info is None or get_source is None else version_in(get_source(info.name) or "")


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

    def __init__(self) -> None:
        self._problems: dict[str, str | None] = {}

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith("megatron.") or fullname.split(".")[1] not in PACKAGES:
            return None
        problem = self.problem()
        if problem is not None:
            return _guarded_spec(fullname, path, problem) if fullname == ARGUMENTS else None
        file = tree_file(fullname)
        if file is None:
            return None
        if _extends(file):
            return _extension_spec(fullname, path, file)
        locations = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=locations)

    def problem(self) -> str | None:
        """Return why megatron-core is left unpatched, or None. Warns of an untested one that is to be patched."""
        spec = _core_spec()
        if spec is None or spec.origin is None:
            return None
        if spec.origin not in self._problems:
            problem = untested_core()
            if problem is not None and any_version():
                command = f"python -m tools.upstream_check {Path(spec.origin).parents[2]} --against DIR"
                _warn(
                    f"{problem}. It is patched, as {SWITCH} is untested. `{command}`, in a checkout of this project, "
                    "where DIR has a megatron-core that was tested, lists what may break; compare a short training "
                    "with an eager one."
                )
                problem = None
            self._problems[spec.origin] = problem
        return self._problems[spec.origin]


def _guarded_spec(name: str, path: Any, problem: str) -> ModuleSpec | None:
    """Find megatron-core's module of flags; its ``validate_args`` will refuse those that need the patch."""
    spec = ordinary_spec(name, path)
    if spec is None:
        return None
    loader: Any = copy.copy(spec.loader)
    run = loader.exec_module

    def exec_module(module: Any) -> None:
        _warn(f"{problem}. It is left unpatched, without CUDA graphs under Megatron-FSDP. {REMEDY}")
        run(module)
        if hasattr(module, "validate_args"):
            module.validate_args = _refusing_graphs(module.validate_args, problem)

    loader.exec_module = exec_module
    spec.loader = loader
    return spec


def _refusing_graphs(validate_args: Callable[..., Any], problem: str) -> Callable[..., Any]:
    @functools.wraps(validate_args)
    def wrapper(args: Any, *others: Any, **named: Any) -> Any:
        validated = validate_args(args, *others, **named)
        if getattr(args, "use_megatron_fsdp", False) and getattr(args, "cuda_graph_impl", "") == "transformer_engine":
            raise ValueError(
                "--use-megatron-fsdp with --cuda-graph-impl transformer_engine needs the patch, which is off: "
                f"{problem}. {REMEDY} Or set {SWITCH}=0 to try megatron-core's own graphs."
            )
        return validated

    return wrapper


def _warn(message: str) -> None:
    """Log a warning on one rank of a job."""
    if os.environ.get("RANK", "0") == "0":
        _logger.warning(message)


class Originals:
    """megatron-core's definitions in an extended module: what ``extend`` returns.

    A name that this tree's file defines anew is megatron-core's own here. Every other name is looked up in the module
    when it is asked for.
    """

    __slots__ = ("__dict__", "__module")

    def __init__(self, module: ModuleType, definitions: dict[str, Any]) -> None:
        self.__module = module
        vars(self).update(definitions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__module, name)


class _WatchedModule(ModuleType):
    """The class of an extended module while it is loaded: notes which names other modules read."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("__"):
            reader = sys._getframe(1).f_globals.get("__name__", "a module without a name")
            self.__spec__.loader.readings.append((reader, name, value))  # type: ignore[union-attr]
        return value


class ExtensionLoader(Loader):
    """Runs megatron-core's file, and then this tree's in the same namespace.

    Whatever else is asked of a loader is answered by the one that megatron-core's module was found with.

    Attributes:
        originals: None before megatron-core's file has run.
        readings: Who read which name of the module while it was loaded, and with which value.
    """

    def __init__(self, found: ModuleSpec, file: Path) -> None:
        self.found = found
        self.file = file
        self.originals: Originals | None = None
        self.readings: list[tuple[str, str, Any]] = []
        self._own = SimpleNamespace()
        self._later: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "found":  # while the loader is copied
            raise AttributeError(name)
        return getattr(self.found.loader, name)

    def exec_module(self, module: ModuleType) -> None:
        kind = type(module)
        module.__class__ = _WatchedModule
        try:
            self.run(module)
        finally:
            module.__class__ = kind
            readings, self.readings = self.readings, []
        stale = [(name, reader) for reader, name, value in readings if vars(module).get(name, value) is not value]
        if stale:
            names, readers = (", ".join(sorted(set(column))) for column in zip(*stale, strict=True))
            raise ImportError(
                f"the patch replaces {names} of {module.__name__}, but {readers} took megatron-core's own first (a "
                "circular import). Define the names before the import that leads there.",
                name=module.__name__,
                path=str(self.file),
            )

    def run(self, module: ModuleType) -> None:
        """Run both files in the namespace of ``module``."""
        ours = SourceFileLoader(self.found.name, str(self.file)).get_code(self.found.name)
        definitions = _changes(module, self._run_found)
        self.originals = Originals(module, definitions)
        own = _changes(module, lambda module: exec(ours or "", vars(module)))
        for name, later in self._later.items():
            own[later] = vars(module)[later] = own.pop(name)
            own[later].__name__ = own[later].__qualname__ = later
            vars(module)[name] = definitions[name]
        self._own = SimpleNamespace(**own)
        for name in definitions.keys() - vars(self._own).keys():
            delattr(self.originals, name)

    def rename(self, later: Mapping[str, str]) -> None:
        """Let names of this tree's file, which is running, stand for those of ``later`` that megatron-core's has."""
        definitions = vars(self.originals)
        self._later.update((name, other) for name, other in later.items() if other in definitions)
        definitions.update((name, definitions[other]) for name, other in self._later.items())

    def _run_found(self, module: ModuleType) -> None:
        loader: Any = self.found.loader
        if module.__name__ == self.found.name:
            loader.exec_module(module)  # loaders such as pytest's, which rewrites assertions, have no get_code
        else:  # as python -m
            exec(loader.get_code(self.found.name), vars(module))

    def get_code(self, fullname: str) -> CodeType:
        """Return what ``python -m`` runs."""
        return compile("import sys\n__spec__.loader.run(sys.modules[__name__])", f"<{fullname}, extended>", "exec")

    def defines(self, kind: type) -> bool:
        """Whether the class ``kind`` is defined at any depth of this tree's file, outside its functions."""
        try:
            return attrgetter(kind.__qualname__)(self._own) is kind
        except AttributeError:
            return False


def _changes(module: ModuleType, run: Callable[[ModuleType], None]) -> dict[str, Any]:
    """Call ``run`` with ``module`` and return the names that it defined or gave another value."""
    namespace = vars(module)
    before = dict(namespace)
    run(module)
    missing = object()
    return {
        name: value
        for name, value in namespace.items()
        if not (name.startswith("__") and name.endswith("__")) and before.get(name, missing) is not value
    }


def _extension_spec(name: str, path: Any, file: Path) -> ModuleSpec:
    found = ordinary_spec(name, path)
    if found is None:
        raise ImportError(f"{file} extends {name}, and megatron-core has no such module", name=name)
    spec = copy.copy(found)
    spec.loader = ExtensionLoader(found, file)
    return spec


def _extension(module: ModuleType | None) -> ExtensionLoader | None:
    """Return the loader of ``module``, if it is an extended one."""
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    return loader if isinstance(loader, ExtensionLoader) else None


def _check_name(name: str) -> None:
    if not name.startswith("megatron."):
        raise ImportError(f"{name} is no megatron.* module: import a file of the patch as megatron.*", name=name)


def upstream(name: str) -> Any:
    """Return megatron-core's own definitions in the module ``name``.

    Of a module that this tree extends they are what ``extend`` returns there, also while its file in this tree still
    runs. Any other module of megatron-core's, and every one with the patch off, is itself.

    Raises ImportError if megatron-core has no such module, if this tree replaces it, or if ``name`` is not a
    ``megatron.*`` name.
    """
    _check_name(name)
    module = importlib.import_module(name)
    file = tree_file(name)
    if file is None or not is_active():
        return module
    if not _extends(file):
        raise ImportError(f"{name} is the patch's own: nothing in it is megatron-core's", name=name)
    return extend(name)


def extend(name: str, later: Mapping[str, str] | None = None) -> Any:
    """Return megatron-core's definitions in the module that a file of this tree extends.

    Such a file has ``_upstream = extend(__name__)`` after its imports. ``_upstream.Name`` is megatron-core's ``Name``
    also after the file defines its own.

    ``later`` has names of this tree's file that a later megatron-core has under another name, by which it may have
    something else. There ``_upstream.Name`` is what has that other name, and the file's definition takes its place.

    Raises ImportError if ``name`` is not a module that was loaded as an extended one, or if megatron-core's file is
    still running.
    """
    loader = _extension(sys.modules.get(name))
    if loader is None:
        _check_name(name)
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
    loader.rename(later or {})
    return loader.originals


def is_patched(module: ModuleType) -> bool:
    """Whether ``module`` was loaded from this tree's file, or from megatron-core's and this tree's."""
    return _extension(module) is not None or module.__file__ == str(tree_file(module.__name__))


def _getfile_of_both(getfile: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return ``inspect.getfile`` that knows both files of an extended module, and classes published by another one."""

    @functools.wraps(getfile)
    def wrapper(object: Any) -> str:
        module = sys.modules.get(getattr(object, "__module__", "")) if isinstance(object, type) else None
        extension = _extension(module)
        if extension is not None and extension.defines(object):
            return str(extension.file)
        if module is not None and getattr(module, "__file__", None) == str(tree_file(module.__name__)):
            return _file_of_methods(object) or getfile(object)
        return getfile(object)

    return wrapper


def _file_of_methods(kind: type) -> str | None:
    """Return the file of the first function in the body of the class ``kind``; None if it has none."""
    own = f"{kind.__qualname__}."
    codes = (getattr(getattr(value, "__func__", value), "__code__", None) for value in vars(kind).values())
    return next((code.co_filename for code in codes if code and code.co_qualname.startswith(own)), None)


def is_active() -> bool:
    """Whether the patch is on in this process."""
    return any(finder.problem() is None for finder in sys.meta_path if isinstance(finder, OverlayFinder))


def switch() -> Literal["on", "off", "untested"]:
    """Return what the environment variable ``MEGATRON_FSDP_CUDA_GRAPHS`` says, in any usual spelling."""
    return SETTINGS.get(os.environ.get(SWITCH, "").strip().lower(), "on")


def any_version() -> bool:
    """Whether versions of megatron-core are patched that are not in ``TESTED_VERSIONS``."""
    return switch() == "untested"


def activate() -> None:
    """Turn the patch on in this process. torch calls this at the end of ``import torch``; once is enough.

    Warns, and never raises, where the patch stays off because a module that it replaces is imported already, and of an
    unknown value of the environment variable ``MEGATRON_FSDP_CUDA_GRAPHS``.
    """
    if any(isinstance(finder, OverlayFinder) for finder in sys.meta_path):
        return
    value = os.environ.get(SWITCH, "")
    if value.strip().lower() not in SETTINGS:
        _warn(
            f"{SWITCH}={value} is ignored: set it to 1 (patch on, the default), 0 (patch off) or untested (patch on, "
            "with any version of megatron-core)"
        )
    if switch() == "off":
        return
    finder = OverlayFinder()
    loaded = [name for name in sorted(sys.modules) if name.startswith("megatron.") and tree_file(name)]
    if loaded and finder.problem() is None:
        _warn(
            f"the patch for CUDA graphs under Megatron-FSDP stays off, as {', '.join(loaded)} came from megatron-core "
            f"before. Import torch, or call {__name__}.activate(), before anything imports megatron."
        )
        return
    sys.meta_path.insert(0, finder)
    inspect.getfile = _getfile_of_both(inspect.getfile)  # type: ignore[assignment]
