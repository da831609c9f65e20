"""Puts this tree's files in front of megatron-core's modules of the same path.

``activate`` registers one finder on ``sys.meta_path``. For ``megatron.a.b`` the finder answers with this tree's
``a/b.py`` if there is one; every other import goes on as usual.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent


class OverlayFinder(MetaPathFinder):
    """Finds the modules that this tree replaces or adds."""

    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        package, *parts = fullname.split(".")
        if package != "megatron" or len(parts) < 2:
            return None
        file = ROOT.joinpath(*parts).with_suffix(".py")
        if not file.is_file():
            return None
        return importlib.util.spec_from_file_location(fullname, file)


def upstream(name: str) -> ModuleType:
    """Return megatron-core's own module called ``name``, which a file of this tree stands in front of.

    The module is loaded once, beside the patched one. Its classes keep ``name`` as their ``__module__``, so they
    pickle under the public name.
    """
    parent, _, leaf = name.rpartition(".")
    alias = f"{parent}._upstream_{leaf}"
    if alias in sys.modules:
        return sys.modules[alias]
    found = PathFinder.find_spec(name, sys.modules[parent].__path__)
    if found is None or found.origin is None:
        raise ImportError(f"megatron-core has no module {name}")
    spec = importlib.util.spec_from_file_location(name, found.origin)
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[alias]
        raise
    return module


def extend(name: str) -> ModuleType:
    """Let the patched module ``name`` answer for every name of megatron-core's own that it does not define.

    Names are looked up when they are asked for, so a module-level variable of megatron-core is always the live one.
    """
    module, original = sys.modules[name], upstream(name)

    def missing(attribute: str):
        try:
            return getattr(original, attribute)
        except AttributeError:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}") from None

    module.__getattr__ = missing  # type: ignore[method-assign]
    module.__dir__ = lambda: sorted({*vars(module), *vars(original)})  # type: ignore[method-assign]
    return original


def activate() -> None:
    """Register the finder. torch calls this at the end of ``import torch``."""
    if not any(isinstance(finder, OverlayFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, OverlayFinder())
