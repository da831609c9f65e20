"""The exchange of a model's raw parameters for the optimizer's, and back.

A module under Megatron-FSDP holds raw parameters while it computes, and the optimizer's ``DTensor`` parameters while
the optimizer steps. megatron-core looks up the place of each by name, in every step; a ``ParameterSwap`` knows them.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch


class ParameterSwap:
    """Knows the place of every parameter of a model."""

    def __init__(
        self,
        model: torch.nn.Module,
        raw: Mapping[str, torch.nn.Parameter],
        distributed: Mapping[str, torch.nn.Parameter],
    ):
        """Find the places of the parameters of ``model``, which may hold either set, tied parameters included.

        Args:
            raw: Its raw parameters, by name.
            distributed: The optimizer's parameters, by the same names.

        Raises:
            KeyError: a parameter of the model is in neither set.
        """
        pairs = [(param, distributed[name]) for name, param in raw.items()]
        pair_of = {id(param): pair for pair in pairs for param in pair} | {id(None): (None, None)}
        modules = list(model.modules())
        own_params = [module._parameters for module in modules]
        # Of each module its raw parameters and the optimizer's, by the names that it gives them, in its order.
        kinds = [
            tuple({name: pair_of[id(param)][kind] for name, param in own.items()} for kind in (0, 1))
            for own in own_params
        ]
        children = [module._modules for module in modules]
        self._held = partial(_values, own_params), partial(_values, children)
        self._expected = [_values([params[kind] for params in kinds]) for kind in (0, 1)]
        self._modules = _values(children)
        self._distinct = [[*dict.fromkeys(param for param in each if param is not None)] for each in self._expected]
        places = [(module, params) for module, params in zip(modules, kinds, strict=True) if params[0]]
        # All in one loop, as it runs twice in every step.
        self._directly = [(module._parameters, params) for module, params in places if _sets_directly(module)]
        self._by_setattr = [(module, params) for module, params in places if not _sets_directly(module)]

    def params(self, distributed: bool) -> list[torch.nn.Parameter]:
        """Return the model's distinct parameters, in its order: the optimizer's or the raw ones."""
        return self._distinct[distributed]

    def holds(self, distributed: bool) -> bool:
        """Whether the model has the modules it had, and exactly the optimizer's parameters or exactly the raw ones."""
        params, modules = self._held
        return _same(modules(), self._modules) and _same(params(), self._expected[distributed])

    def to(self, distributed: bool) -> None:
        """Give every module the optimizer's parameters, or the raw ones."""
        for own, params in self._directly:
            own.update(params[distributed])
        for module, params in self._by_setattr:
            for name, param in params[distributed].items():
                if param is not None:
                    setattr(module, name, param)


def _values(dictionaries: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dictionaries)))


def _same(held: list[Any], expected: list[Any]) -> bool:
    """Whether these are the same objects: compared in every step, hence without a loop in Python."""
    return len(held) == len(expected) and all(map(is_, held, expected))


def _sets_directly(module: torch.nn.Module) -> bool:
    """Whether the module's class leaves setting a parameter to ``torch.nn.Module``."""
    kind, base = type(module), torch.nn.Module
    registers: Any = kind.register_parameter
    # TransformerEngine's notes how a parameter is initialized, which is the same each time it is set.
    usual = registers is base.register_parameter or registers.__module__.startswith("transformer_engine.")
    return kind.__setattr__ is base.__setattr__ and usual
