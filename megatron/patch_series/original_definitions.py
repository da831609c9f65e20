"""What a module of megatron-core defined before definitions of per-layer CUDA graphs took the place of some.

Such a module ends with a part that begins with ``extend(__name__)`` and defines classes and functions anew, on top of
those that the module had until then.
"""

import importlib
import sys
from types import FunctionType, SimpleNamespace
from typing import Any

_before: dict[str, SimpleNamespace] = {}  # by module


def extend(name: str) -> Any:
    """Return the definitions of the module ``name`` from the time of the first call, which is made in it."""
    if name not in _before:
        _before[name] = SimpleNamespace(**vars(sys.modules[name]))
    return _before[name]


def upstream(name: str) -> Any:
    """Return the definitions that the module ``name`` had before ``extend``; itself if it has no such part."""
    module = importlib.import_module(name)
    return _before.get(name, module)


def publish(definition: type | FunctionType, name: str) -> None:
    """Make ``definition`` one of the module ``name``, by which pickles then name it."""
    definition.__module__ = name
