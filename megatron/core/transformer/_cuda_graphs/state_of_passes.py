"""What a recorded forward pass leaves on the host for the next one, in attributes of modules: no replay would."""

import weakref
from collections import deque
from operator import is_
from types import SimpleNamespace
from typing import Any

import torch

from .errors import UnsupportedError

_Key = tuple[int, str]  # the id of a module, and an attribute


class StateOfPasses:
    """Attributes that passes read and set, each with what it held.

    What is noted before a pass is recorded (in warm-up) counts for ``undo`` only.
    """

    def __init__(self) -> None:
        self._before: dict[_Key, tuple[torch.nn.Module, Any]] = {}  # what the first pass found
        self._found: dict[_Key, tuple[torch.nn.Module, Any]] = {}  # what recorded passes found before they set it
        self._left: dict[_Key, Any] = {}  # what they set last

    def note_read(self, module: torch.nn.Module, name: str) -> None:
        """Called before a pass reads an attribute."""
        key = self._key(module, name)
        if key not in self._left and key not in self._found and torch.cuda.is_current_stream_capturing():
            self._found[key] = module, _remembered(value_of(module, name))

    def note_set(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """Called before a pass sets an attribute to ``value``."""
        key = self._key(module, name)
        if torch.cuda.is_current_stream_capturing():
            self._left[key] = _remembered(value)

    def _key(self, module: torch.nn.Module, name: str) -> _Key:
        key = id(module), name
        if key not in self._before:
            self._before[key] = module, kept(value_of(module, name))
        return key

    def refuse_any(self) -> None:
        """Make sure that recorded passes left nothing for the next one.

        Raises:
            UnsupportedError: they read an attribute before they set it, and left it with another value.
        """
        for key, (module, found) in self._found.items():
            left = self._left[key] if key in self._left else _remembered(value_of(module, key[1]))
            if found is not left and (_is_tensor(found) or _is_tensor(left) or differ(found, left)):
                raise UnsupportedError(
                    f"each forward pass reads and changes {key[1]} of {type(module).__name__}, and a replay would do "
                    "neither: keep it in a buffer on the device and change that in place, or set --cuda-graph-modules "
                    "to other parts of layers"
                )

    def undo(self) -> None:
        """Let attributes have what they had before the first pass."""
        for (_, name), (module, value) in self._before.items():
            own = vars(module)
            now = own.get(name)
            if name not in own or not differ(now, value):
                continue
            if isinstance(now, list) and isinstance(value, list):
                now[:] = value
            elif isinstance(now, dict) and isinstance(value, dict):
                now.clear()
                now.update(value)
            else:
                own[name] = value


def value_of(module: torch.nn.Module, name: str) -> Any:
    """Return what the attribute holds of the module itself, a buffer perhaps; None if it is not there."""
    own = vars(module)
    return own[name] if name in own else own["_buffers"].get(name)


def tensors_in(value: Any) -> dict[Any, torch.Tensor]:
    """The tensors that a list, a tuple or a dictionary holds, by index or key; nothing in other objects."""
    if isinstance(value, dict):
        places: Any = value.items()
    else:
        places = enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {key: each for key, each in places if isinstance(each, torch.Tensor)}


def _remembered(value: Any) -> Any:
    """Return what to know ``value`` by later, without keeping the memory of tensors: a copy if it is data.

    Of a tensor that is the one weak reference to it, and of a list, or the like, with tensors in it how long it is.
    """
    if isinstance(value, torch.Tensor):
        return weakref.ref(value)
    copied = kept(value)
    return len(value) if copied is value and isinstance(value, (list, dict, set, deque)) else copied


def _is_tensor(remembered: Any) -> bool:
    return isinstance(remembered, weakref.ref)


def kept(value: Any) -> Any:
    """Return what to compare ``value`` with later: a copy if it can change in place, and else itself.

    A list, say, with a tensor or itself in it is not copied: those are mostly results, or caches. Neither are tensors
    on the device, which replays read; a number in a tensor on the host becomes a part of an operation.
    """
    if isinstance(value, torch.Tensor):
        return value.clone() if _is_number_on_host(value) else value
    try:
        if _holds_tensors(value):
            return value
    except RecursionError:
        return value
    if isinstance(value, dict):
        return {key: kept(each) for key, each in value.items()}
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**kept(vars(value)))
    for kind in (list, set, deque):
        if isinstance(value, kind):
            return kind(map(kept, value))
    if type(value) is tuple:
        copied = tuple(map(kept, value))
        return value if all(map(is_, copied, value)) else copied
    return value


def differ(one: Any, other: Any) -> bool:
    """Whether two values are neither the same nor equal; of tensors only numbers on the host count as equal.

    To compare others would wait for the device, and graphs read the memory of the tensor that they were captured with.
    """
    if one is other:
        return False
    try:
        if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
            return not (_is_number_on_host(one) and _is_number_on_host(other) and torch.equal(one, other))
        if isinstance(one, SimpleNamespace) and isinstance(other, SimpleNamespace):
            one, other = vars(one), vars(other)
        if isinstance(one, dict) and isinstance(other, dict):
            return one.keys() != other.keys() or any(differ(each, other[key]) for key, each in one.items())
        for kind in (list, tuple, deque):
            if isinstance(one, kind) and isinstance(other, kind):
                return len(one) != len(other) or any(map(differ, one, other))
        return bool(one != other)
    except Exception:  # arrays, of which each element is compared, or what holds itself
        return True


def _is_number_on_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.ndim


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, SimpleNamespace):
        return _holds_tensors(vars(value))
    if isinstance(value, (list, tuple, set, deque)):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)
