"""An optimizer's step on the local shards of its parameters.

Under Megatron-FSDP parameters, gradients and optimizer states are ``DTensor``. An optimizer that updates each element
by itself takes their local tensors one after another, at the price of a dispatch through Python each. ``LocalShards``
lets it see the local tensors from the start.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .kept_gradients import gradients_of, local_tensor, same, stay
from .listed_step import ListedStep

_LOCAL = attrgetter("_local_tensor")


class LocalShards:
    """The local tensors of an optimizer's parameters and states.

    They share memory with what the optimizer owns, and updates are in place, so nothing is copied back.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        """Find the local tensors of ``optimizer``, which must be ``eligible``."""
        self._optimizer = optimizer
        self._name = "decoupled_grad" if getattr(optimizer, "use_decoupled_grad", False) else "grad"
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._params: list[Any] = list(chain.from_iterable(self._groups))
        self._locals = [torch.nn.Parameter(param._local_tensor, requires_grad=False) for param in self._params]
        left = iter(self._locals)
        self._local_groups = [[next(left) for _ in group] for group in self._groups]
        self._listed: ListedStep | None = None
        states = optimizer.state
        self._states, self._of_params = states, list(states.values())
        self._values = _values(self._of_params)
        self._wrapped = [value for value in (*self._params, *self._values) if isinstance(value, DTensor)]
        self._unwrapped = [value._local_tensor for value in self._wrapped]
        self._local_states: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for param, local in zip(self._params, self._locals, strict=True):
            if param in states:
                self._local_states[local] = {name: local_tensor(value) for name, value in states[param].items()}
        self._without_states = [param for param in self._params if not states.get(param)]

    @staticmethod
    def eligible(optimizer: torch.optim.Optimizer, kinds: Iterable[type]) -> bool:
        """Whether the step of ``optimizer`` does the same to local tensors as to ``DTensor``.

        Args:
            optimizer: The optimizer.
            kinds: Classes of optimizers that update each element by itself, and nothing but tensors, in place.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return (
            type(optimizer) in kinds
            and not getattr(optimizer, "master_weights", False)
            and not getattr(optimizer, "_scales", None)  # of states in low precision, by parameter
            and bool(params)
            and all(isinstance(param, DTensor) for param in params)
            and all(torch.is_tensor(value) for state in optimizer.state.values() for value in state.values())
        )

    def current(self) -> bool:
        """Whether parameters and states are those that were found, and every parameter with a gradient has states."""
        groups, states = self._optimizer.param_groups, self._optimizer.state
        return (
            len(groups) == len(self._groups)
            and all(same(group["params"], params) for group, params in zip(groups, self._groups, strict=True))
            and states is self._states
            and same(list(states.values()), self._of_params)
            and same(_values(self._of_params), self._values)
            and all(map(is_, map(_LOCAL, self._wrapped), self._unwrapped))
            and gradients_of(self._without_states, self._name) == [None] * len(self._without_states)
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it, the optimizer has the local tensors. The caller must run exactly one step in it."""
        optimizer = self._optimizer
        name = self._name
        grads = gradients_of(self._params, name)
        listed = self._listed_step(grads)
        step: AbstractContextManager[None]
        if listed is not None and listed.complete:
            groups, given, step = listed.leaders, listed.led, listed.replay()
        else:
            pairs = zip(self._locals, map(local_tensor, grads), strict=True)
            groups, given = self._local_groups, [(local, grad) for local, grad in pairs if grad is not None]
            step = nullcontext() if listed is None else listed.record()
        for local, grad in given:
            setattr(local, name, grad)
        overridden = [group["foreach"] for group in optimizer.param_groups if "foreach" in group]
        try:
            optimizer.state = self._local_states
            for group, params in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = list(params)
                if group.get("foreach", False) is None:
                    group["foreach"] = False  # as torch chooses for DTensor: other kernels may round differently
            with step:
                yield
        finally:
            optimizer.state = self._states
            for group, params in zip(optimizer.param_groups, self._groups, strict=True):
                group["params"] = params
                if "foreach" in group:
                    group["foreach"] = overridden.pop(0)
            for local, _ in given:
                setattr(local, name, None)

    def _listed_step(self, grads: list[Any]) -> ListedStep | None:
        """Return what to run a step with ``grads`` by; None if the optimizer runs it by itself."""
        if not ListedStep.possible(self._optimizer):
            return None
        if self._listed is not None and self._listed.are(grads):
            return self._listed if self._listed.complete else None  # what could not be listed will not be
        self._listed = ListedStep(self._optimizer, self._local_groups, grads) if stay(grads) else None
        return self._listed


def _values(states: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, states)))
