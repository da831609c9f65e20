"""Classes and functions that are defined in one module and are another's for whoever imports or pickles them."""

import inspect
from types import FunctionType

files: dict[tuple[str, str], str] = {}  # by module and name of a class, the file that defines it


def publish(definition: type | FunctionType, name: str) -> None:
    """Make ``definition`` one of the module ``name``, by which pickles then name it."""
    if isinstance(definition, type):  # a function knows its file itself
        files[name, definition.__qualname__] = inspect.getfile(definition)
    definition.__module__ = name
