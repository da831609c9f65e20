"""Notes which attributes passes read of modules and of their configurations."""

import dis
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch

from .replacements import Replacements
from .state_of_passes import StateOfPasses, tensors_in, value_of

PARSED_FLAGS = "_GLOBAL_ARGS"  # of ``training_globals``
# Attributes that hold options, of whatever class; the second has the experts of a router's next pass.
_OPTIONS = ("config", "router_replay")
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: a class of C, none of Megatron's configurations
_ORIGINAL = "_torchdynamo_orig_callable"  # what torch.compile keeps its argument as
# Private attributes that torch or Megatron-FSDP sets on any module.
_OF_ANY_MODULE = frozenset((*vars(torch.nn.Module()), "_training_state"))
# Not all of ``megatron``: Megatron-Bridge's adapters, say, are ``megatron.bridge``.
_KNOWN_PACKAGES = (
    *("torch.", "megatron.core.", "megatron.training.", "megatron_fsdp_cuda_graphs.", "transformer_engine."),
    *("builtins.", "typing.", "abc."),
)


class AttributeReads:
    """The attributes that forward passes read of modules and of their configurations.

    Private ones count in modules of classes that are neither megatron-core's nor torch's or TransformerEngine's.

    What ``torch.compile`` made runs unwatched: it would compile the watching too, and what it compiles anew may have
    other bits than in training. All attributes that its code names count as read.

    Attributes:
        of: The names, by the ``id`` of the object. What a pass sets itself is left out: that is its result.
        tensors: By the ``id`` of a third-party module and an attribute that holds a list, tuple or dictionary, the
            tensors in it, by index or key; only where passes left them as they were.
    """

    def __init__(self) -> None:
        self.of: dict[int, set[str]] = {}
        self.tensors: dict[tuple[int, str], dict[Any, torch.Tensor]] = {}
        self._written: dict[int, set[str]] = {}

    @contextmanager
    def noted(self, roots: Iterable[torch.nn.Module], *, stateless: bool = False) -> Iterator[None]:
        """Note what is read of all modules, and of the configurations of those in ``roots``, in this context.

        Args:
            stateless: Whether passes that are recorded must leave nothing for the next one (``StateOfPasses``) in
                modules of ``is_third_party``. After an exception these are as before.

        Raises:
            UnsupportedError: they do.
        """
        roots, watch, state = list(roots), Replacements(), StateOfPasses() if stateless else None
        found: dict[tuple[int, str], tuple[torch.nn.Module, dict[Any, torch.Tensor]]] = {}

        def note_read(module: torch.nn.Module, name: str) -> None:
            if (id(module), name) not in found:
                found[id(module), name] = module, tensors_in(value_of(module, name))
            if state is not None:
                state.note_read(module, name)

        note_set = None if state is None else state.note_set
        for kind in {torch.nn.Module, *map(type, options_of(roots))}:
            if not kind.__flags__ & _IMMUTABLE:
                watch.add(kind, "__getattribute__", _noting(kind.__getattribute__, self.of, note_read))
                watch.add(kind, "__setattr__", _noting(kind.__setattr__, self._written, note_set))
        for owner, name, compiled in _compiled(roots):
            watch.add(owner, name, self._unwatched(watch, owner, compiled))
        try:
            with watch:
                yield
            if state is not None:
                state.refuse_any()
        except BaseException:
            if state is not None:
                state.undo()
            raise
        for owner, names in self._written.items():
            self.of.get(owner, set()).difference_update(names)
        for (owner, name), (module, before) in found.items():
            if before and name in self.of.get(owner, ()) and _same(before, tensors_in(value_of(module, name))):
                self.tensors[owner, name] = before

    def ran(self, module: torch.nn.Module) -> bool:
        """Whether a pass read anything of ``module`` itself: walks through a model read what all modules have."""
        return any(name == "forward" or not hasattr(torch.nn.Module, name) for name in self.of.get(id(module), ()))

    def _unwatched(self, watch: Replacements, owner: Any, compiled: Any) -> Callable[..., Any]:
        """Return ``compiled``, an attribute of ``owner``, without anything being noted while it runs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            watch.remove()
            try:
                if isinstance(owner, torch.nn.Module):
                    self._note_module(owner)
                else:
                    self._note_function(args[0], getattr(compiled, _ORIGINAL))
                return compiled(*args, **kwargs)
            finally:
                watch.install()

        return run

    def _note_module(self, root: torch.nn.Module) -> None:
        """Note all attributes that ``forward`` names of ``root`` and of the modules in it."""
        for module in root.modules():
            self.of.setdefault(id(module), set()).add("forward")
            self._note_function(module, module.forward)

    def _note_function(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        """Note all attributes that ``function``, a method of ``module``, names, and the methods that it calls."""
        read, written = _attributes(type(module), function)
        config = vars(module).get("config")
        for owner, there in (module, {*vars(module), *dir(type(module))}), (config, vars(config) if config else ()):
            self.of.setdefault(id(owner), set()).update(read.intersection(there))
            self._written.setdefault(id(owner), set()).update(written.intersection(there))
        for child in read & module._modules.keys():
            if module._modules[child] is not None:
                self._note_module(module._modules[child])


def options_of(roots: Iterable[torch.nn.Module]) -> list[Any]:
    """Return what modules in ``roots`` have options from, each once.

    That is what an attribute of a module holds, by itself, in a list or the like, or in other options, if it is one of
    ``_OPTIONS``, has parsed flags, or is of a dataclass: one called ``...Config``, or of neither megatron-core nor
    torch, where others hold what passes leave to each other. And Megatron's own parsed flags, which any module can ask
    for.
    """
    found: dict[int, Any] = {}
    looked_at: set[int] = set()  # some hold themselves

    def find(value: Any, is_options: bool = False) -> None:
        kind: Any = type(value)
        if isinstance(value, (list, tuple, dict)):
            inside: Iterable[Any] = value.values() if isinstance(value, dict) else value
        elif (is_options or _has_options(kind)) and hasattr(value, "__dict__"):
            found[id(value)] = value
            inside = vars(value).values()
        else:
            return
        if id(value) not in looked_at:
            looked_at.add(id(value))
            for each in inside:
                find(each)

    for module in (module for root in roots for module in root.modules()):
        for name, value in vars(module).items():
            find(value, name in _OPTIONS)
    find(training_globals().get(PARSED_FLAGS), True)
    return list(found.values())


def training_globals() -> dict[str, Any]:
    """Return the global variables of Megatron's training loop, of which ``get_args`` returns one; empty without it."""
    module = sys.modules.get("megatron.training.global_vars")
    return {} if module is None else vars(module)


@cache
def _has_options(kind: type) -> bool:
    return issubclass(kind, Namespace) or (
        is_dataclass(kind) and (kind.__name__.endswith("Config") or _comes_from_elsewhere(kind))
    )


@cache
def is_third_party(kind: Any) -> bool:
    """Whether ``kind`` is a class of modules with a base that megatron-core, torch and TransformerEngine lack.

    Those of TransformerEngine and what derives from them set much of their own from pass to pass: they are not.
    """
    return issubclass(kind, torch.nn.Module) and not is_of_transformer_engine(kind) and _comes_from_elsewhere(kind)


@cache
def is_of_transformer_engine(kind: Any) -> bool:
    """Whether ``kind`` is a class of TransformerEngine, or derives from one."""
    return any(base.__module__.startswith("transformer_engine.") for base in kind.__mro__)


def _noting(
    access: Callable[..., Any], noted: dict[int, set[str]], note_state: Callable[..., None] | None
) -> Callable[..., Any]:
    def access_noted(owner: Any, name: str, *value: Any) -> Any:
        kind: Any = type(owner)
        third_party = is_third_party(kind)
        if not name.startswith("_") or (third_party and name[:2] != "__" and name not in _OF_ANY_MODULE):
            noted.setdefault(id(owner), set()).add(name)
            if third_party and note_state is not None:
                note_state(owner, name, *value)
        return access(owner, name, *value)

    return access_noted


def _same(some: dict[Any, torch.Tensor], others: dict[Any, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(tensor is others[key] for key, tensor in some.items())


def _comes_from_elsewhere(kind: type) -> bool:
    return not all(f"{base.__module__}.".startswith(_KNOWN_PACKAGES) for base in kind.__mro__)


def _compiled(roots: Iterable[torch.nn.Module]) -> Iterator[tuple[Any, str, Any]]:
    """Yield what ``torch.compile`` made of methods: of modules in ``roots``, and of their classes, each once."""
    owners = [owner for root in roots for module in root.modules() for owner in (module, *type(module).__mro__)]
    for owner in dict.fromkeys(owners):
        for name, value in list(vars(owner).items()):
            if callable(value) and _ORIGINAL in getattr(value, "__dict__", ()):
                yield owner, name, value


def _attributes(kind: type, function: Callable[..., Any]) -> tuple[set[str], set[str]]:
    """Return the names of attributes that a method of ``kind``, and methods that it calls, read and set."""
    read: set[str] = set()
    written: set[str] = set()
    left = [getattr(getattr(function, _ORIGINAL, function), "__code__", None)]
    seen: set[CodeType | None] = {None}
    while left:
        code = left.pop()
        if code in seen or code is None:
            continue
        seen.add(code)
        left += [each for each in code.co_consts if isinstance(each, CodeType)]
        for each in dis.get_instructions(code):
            if each.opname == "STORE_ATTR":
                written.add(each.argval)
            elif each.opname in ("LOAD_ATTR", "LOAD_METHOD") and not each.argval.startswith("_"):
                read.add(each.argval)
        for name in code.co_names:
            method = getattr(kind, name, None)
            if isinstance(method, FunctionType) and not hasattr(torch.nn.Module, name):
                left.append(getattr(method, _ORIGINAL, method).__code__)
    return read, written
