"""Swap a model's raw parameters for the optimizer's, and back.

A module under Megatron-FSDP has raw parameters while it computes, and the optimizer's ``DTensor`` parameters during the
optimizer step. megatron-core looks up each parameter by name in every step; a ``ParameterSwap`` does so only once.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch


class ParameterSwap:
    """Swaps a model between its raw parameters and the optimizer's ``DTensor`` parameters.

    It writes directly to ``module._parameters``: overrides of ``__setattr__`` and ``register_parameter`` have already
    seen both sets.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        raw: Mapping[str, torch.nn.Parameter],
        distributed: Mapping[str, torch.nn.Parameter],
    ):
        """Look up the raw and the optimizer's parameters of each module of ``model``.

        Each module may currently have either kind. Tied parameters are supported.

        Args:
            model: The model.
            raw, distributed: All raw parameters and all of the optimizer's, with the same names.

        Raises:
            KeyError: A parameter of the model is neither in ``raw`` nor in ``distributed``.
        """
        pairs = [(param, distributed[name]) for name, param in raw.items()]
        pair_of = {id(param): pair for pair in pairs for param in pair} | {id(None): (None, None)}
        modules = list(model.modules())
        self._own = [module._parameters for module in modules]
        # The raw parameters of each module that has any, then the optimizer's parameters.
        self._sets = [
            [(own, {name: pair_of[id(param)][kind] for name, param in own.items()}) for own in self._own if own]
            for kind in (0, 1)
        ]
        self._children = [module._modules for module in modules]
        self._modules = values_of(self._children)
        self._params = [values_of(params for _, params in each) for each in self._sets]

    def holds(self, distributed: bool) -> bool:
        """Return whether all modules have the optimizer's parameters if ``distributed``, else the raw ones.

        Return False if a module was replaced, or its parameters were replaced, added or removed.
        """
        children, params = values_of(self._children), values_of(self._own)
        return same(children, self._modules) and same(params, self._params[distributed])

    def to(self, distributed: bool) -> None:
        """Set the parameters of every module to the optimizer's if ``distributed``, else to the raw ones."""
        for own, params in self._sets[distributed]:
            own.update(params)


def values_of(dictionaries: Iterable[dict[Any, Any]]) -> list[Any]:
    """Return the values of all ``dictionaries`` in order."""
    return list(chain.from_iterable(map(dict.values, dictionaries)))


def same(these: list[Any], those: list[Any]) -> bool:
    """Return whether both lists contain the same objects in the same order."""
    return len(these) == len(those) and all(map(is_, these, those))
