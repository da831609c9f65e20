"""Steps of TransformerEngine's ``FusedAdam`` that reuse the tensor lists of an earlier step.

``FusedAdam`` inspects every parameter, its gradient and its states in each step, to list them for one launch per group.
Under Megatron-FSDP all of them are ``DTensor``, which makes each look expensive.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from megatron.core.transformer._cuda_graphs.replacements import replaced_attribute

LAUNCH = "multi_tensor_adam"  # FusedAdam's attribute: a function of a chunk size, a flag, lists of tensors and numbers
Lists = list[list[torch.Tensor]]
Inputs = dict[str, list[Any]]


class ListedStep:
    """The launches of a ``FusedAdam`` step and the tensor lists of each.

    A replayed step runs on one parameter of each group, and every launch gets the lists of the whole group. All numbers
    of a step are still the optimizer's.
    """

    def __init__(self, optimizer: Any, gradient: str):
        """Prepare to record the first step.

        Args:
            optimizer: The ``FusedAdam``; its parameters and gradients are ``DTensor``.
            gradient: The attribute of a parameter that holds its gradient.
        """
        self._optimizer, self._gradient = optimizer, gradient
        self._inputs: Inputs = {}
        self._leaders: list[list[Any]] = []
        self._launches: list[list[Lists]] | None = None  # of each group with gradients; None if they are incomplete

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the optimizer's step within this context: as a replay if it reads the objects of the recorded step.

        Raises:
            RuntimeError: a replayed step did not launch once for each group with gradients.
        """
        params = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        grads = [getattr(param, self._gradient, None) for param in params]
        inputs = step_inputs(self._optimizer, grads)
        if inputs["step hooks"]:  # they would see one parameter of each group
            yield
        elif changed_input(inputs, self._inputs):
            with self._recording(grads):
                yield
        elif self._launches is None:
            yield
        else:
            with self._replaying(self._launches):
                yield

    @contextmanager
    def _recording(self, grads: list[Any]) -> Iterator[None]:
        seen: list[Lists] = []
        self._inputs, self._launches = {}, None

        def launch(chunk_size: int, flag: torch.Tensor, lists: Lists, *numbers: Any) -> Any:
            seen.append(list(map(list, lists)))
            return original(chunk_size, flag, lists, *numbers)

        original = getattr(self._optimizer, LAUNCH)
        with replaced_attribute([self._optimizer], LAUNCH, lambda _: launch):
            yield
        self._inputs = inputs = step_inputs(self._optimizer, grads)
        groups, left = self._optimizer.param_groups, iter(grads)
        with_grads = [[param for param in group["params"] if next(left) is not None] for group in groups]
        # Some versions of FusedAdam do not count the steps of a group without parameters.
        self._leaders = [(some or group["params"])[:1] for some, group in zip(with_grads, groups, strict=True)]
        owned = {tensor.data_ptr() for tensor in inputs["local tensors"]}
        if all(tensor.data_ptr() in owned for lists in seen for tensor in chain(*lists)):  # no casts of states
            self._launches = _divided(seen, [len(some) for some in with_grads if some])

    @contextmanager
    def _replaying(self, launches: list[list[Lists]]) -> Iterator[None]:
        launched = 0

        def launch(chunk_size: int, flag: torch.Tensor, _: Lists, *numbers: Any) -> None:
            nonlocal launched
            launched += 1
            for lists in launches[launched - 1] if launched <= len(launches) else ():
                original(chunk_size, flag, lists, *numbers)

        original, groups = getattr(self._optimizer, LAUNCH), self._optimizer.param_groups
        own = [group["params"] for group in groups]
        for group, leader in zip(groups, self._leaders, strict=True):
            group["params"] = leader
        try:
            with replaced_attribute([self._optimizer], LAUNCH, lambda _: launch):
                yield
        finally:
            for group, params in zip(groups, own, strict=True):
                group["params"] = params
        if launched != len(launches):
            raise RuntimeError(f"{type(self._optimizer).__name__}.step did not call {LAUNCH} as in the recorded step")


def _divided(seen: list[Lists], counts: list[int]) -> list[list[Lists]] | None:
    """Return the launches of each group, or None if they do not hold ``counts`` tensors."""
    left, divided = iter(seen), []
    for count in counts:
        launches: list[Lists] = []
        while sum(len(lists[0]) for lists in launches) < count and (lists := next(left, None)) is not None:
            launches.append(lists)
        divided.append(launches)
    held = [sum(len(lists[0]) for lists in launches) for launches in divided]
    return divided if held == counts and next(left, None) is None else None


def step_inputs(optimizer: torch.optim.Optimizer, grads: list[Any]) -> Inputs:
    """Return the objects that a step reads, by name; ``changed_input`` compares them.

    Args:
        optimizer: The optimizer.
        grads: The gradients of its parameters; None where a parameter has none.
    """
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    states = list(filter(torch.is_tensor, chain.from_iterable(map(dict.values, optimizer.state.values()))))
    local = [getattr(each, "_local_tensor", each) for each in chain(params, grads, states)]
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    of_all = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    return {
        "parameters": [each for group in optimizer.param_groups for each in (group, *group["params"])],
        "gradients": grads,
        "states": states,
        "local tensors": list(filter(torch.is_tensor, local)),
        "step hooks": [hook for hooks in (*own, *of_all) for hook in hooks.values()],
    }


def changed_input(now: Inputs, before: Inputs) -> str | None:
    """Return the name of the first inputs of a step that are other objects than before, or None."""
    for name, objects in now.items():
        known = before.get(name, ())
        if len(objects) != len(known) or not all(map(is_, objects, known)):
            return name
    return None
