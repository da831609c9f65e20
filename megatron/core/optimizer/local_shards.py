"""Optimizer steps on local shards.

Under Megatron-FSDP, parameters, gradients and optimizer states are ``DTensor``, and every operation on one is
dispatched through Python. ``LocalShards`` gives elementwise optimizers the local tensors instead.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, compress, islice
from operator import attrgetter, call, is_, methodcaller
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

from megatron.core.transformer._cuda_graphs.replacements import replaced_attribute

from ..distributed.fsdp.src.megatron_fsdp.optimizer_gradients import gradient_name
from ..distributed.fsdp.src.megatron_fsdp.parameter_swap import same, values_of

_LOCAL, _GRAD, _ADDRESS = attrgetter("_local_tensor"), attrgetter("grad"), methodcaller("data_ptr")
Lists = list[list[torch.Tensor]]
LAUNCH = "multi_tensor_adam"  # FusedAdam's launch function: (chunk size, flag, tensor lists, *numbers)


class KeptGradients:
    """A snapshot of ``DTensor`` gradients that stay the same objects from step to step.

    Attributes:
        local: An alias of each local tensor; None for a parameter without a gradient.
    """

    def __init__(self, grads: list[Any]):
        """Store ``grads``, with None for parameters without a gradient. ``stay`` must return True for them."""
        self._grads = grads
        self._present = [grad for grad in grads if grad is not None]
        self._present_local: list[torch.Tensor] = list(map(_LOCAL, self._present))
        self.local = [None if grad is None else grad._local_tensor.detach() for grad in grads]
        self._memory = [local for local in self.local if local is not None]

    def are(self, grads: list[Any]) -> bool:
        """Return whether ``grads`` are the stored objects, with the same local tensors at the same addresses."""
        return (
            same(grads, self._grads)
            and same(list(map(_LOCAL, self._present)), self._present_local)
            and self.addresses() == list(map(_ADDRESS, self._memory))
        )

    def addresses(self) -> list[int]:
        """Return the current address of each gradient."""
        return list(map(_ADDRESS, self._present_local))


class ListedStep(KeptGradients):
    """A step of TransformerEngine's ``FusedAdam`` that reuses the tensor lists of an earlier step.

    In each step, ``FusedAdam`` lists all parameters, gradients and states for one launch per group. A replayed step
    runs on one parameter of each group, and each launch gets the recorded lists of its whole group. Learning rates and
    other numbers still come from the optimizer.

    Attributes:
        complete: Whether the recorded launches contain every gradient, and only tensors that the optimizer owns (no
            casts of its states).
        leaders: A list with one parameter for each group: the first with a gradient, else the first, because some
            versions of ``FusedAdam`` do not count the steps of an empty group.
        led: The leaders with a gradient, each with the local tensor of its gradient.
    """

    def __init__(self, optimizer: Any, params: Sequence[list[torch.Tensor]], grads: list[Any]):
        """Prepare to record a step of ``optimizer``, which must have ``LAUNCH``.

        Args:
            params: The local tensors of each group's parameters.
            grads: The ``DTensor`` gradients in the order of ``params``. ``stay`` must return True for them.
        """
        super().__init__(grads)
        self.complete = False
        self._optimizer = optimizer
        left = iter(self.local)
        pairs = [list(zip(group, islice(left, len(group)), strict=True)) for group in params]
        given = [[(param, grad) for param, grad in group if grad is not None] for group in pairs]
        self.led = [group[0] for group in given if group]
        self.leaders = [[param for param, _ in (some or all_)[:1]] for some, all_ in zip(given, pairs, strict=True)]
        self._counts = [len(group) for group in given if group]
        self._launches: list[list[Lists]] = []  # one list per group with gradients

    @contextmanager
    def record(self) -> Iterator[None]:
        """Context manager that records the kernel launches of an optimizer step, which must cover all parameters."""
        seen: list[Lists] = []

        def launch(chunk_size: int, flag: torch.Tensor, lists: Lists, *numbers: Any) -> Any:
            seen.append(list(map(list, lists)))
            return original(chunk_size, flag, lists, *numbers)

        original = getattr(self._optimizer, LAUNCH)
        with replaced_attribute([self._optimizer], LAUNCH, lambda _: launch):
            yield
        states = (state.values() for state in self._optimizer.state.values())
        groups = (group["params"] for group in self._optimizer.param_groups)
        owned = {tensor.data_ptr() for tensor in chain(*states, *groups, self.local) if tensor is not None}
        used = {tensor.data_ptr() for lists in seen for tensor in chain(*lists)}
        self.complete = self._divide(seen) and used <= owned
        if not self.complete:
            self._launches = []  # may keep temporary tensors alive

    def _divide(self, seen: list[Lists]) -> bool:
        """Assign the recorded launches to groups; return whether they contain exactly one tensor per gradient."""
        left = iter(seen)
        for count in self._counts:
            launches: list[Lists] = []
            while sum(len(lists[0]) for lists in launches) < count and (lists := next(left, None)) is not None:
                launches.append(lists)
            self._launches.append(launches)
        held = [sum(len(lists[0]) for lists in launches) for launches in self._launches]
        return held == self._counts and next(left, None) is None

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Context manager in which a step on ``leaders``, one parameter per group, updates every parameter.

        Raises:
            RuntimeError: The number of kernel launches differs from the number of groups with gradients.
        """
        launched = 0

        def launch(chunk_size: int, flag: torch.Tensor, _: Lists, *numbers: Any) -> None:
            nonlocal launched
            launched += 1
            for lists in self._launches[launched - 1] if launched <= len(self._launches) else ():
                original(chunk_size, flag, lists, *numbers)

        original = getattr(self._optimizer, LAUNCH)
        with replaced_attribute([self._optimizer], LAUNCH, lambda _: launch):
            yield
        if launched != len(self._launches):
            raise RuntimeError(
                f"{type(self._optimizer).__name__}.step did not call {LAUNCH} as in the recorded step ({launched} "
                f"calls, {len(self._launches)} expected), so not all parameters were updated: load the last "
                "checkpoint. If a hook of the optimizer was added later, add it before the first step"
            )


class LocalShards:
    """Local tensors of an optimizer's parameters and states.

    They alias the optimizer's tensors, which are updated in place, so nothing is copied back. As soon as the optimizer
    releases one state (to offload or to load states, for example), this object releases all of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        """Collect the local tensors of ``optimizer``, which must be ``eligible``."""
        self._optimizer = optimizer
        self._name = gradient_name(getattr(optimizer, "use_decoupled_grad", False))
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._params: list[Any] = list(chain.from_iterable(self._groups))
        self._locals = [torch.nn.Parameter(param._local_tensor, requires_grad=False) for param in self._params]
        left = iter(self._locals)
        self._local_groups = [[next(left) for _ in group] for group in self._groups]
        self._listed: ListedStep | None = None
        states = optimizer.state
        values = values_of(states.values())
        drop = weakref.WeakMethod(self._drop)
        self._with_states = list(states)
        self._values = [weakref.ref(value, lambda _: (method := drop()) and method()) for value in values]
        self._is_wrapped = [isinstance(value, DTensor) for value in values]
        self._unwrapped = list(map(_LOCAL, chain(self._params, compress(values, self._is_wrapped))))
        self._local_states: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for param, local in zip(self._params, self._locals, strict=True):
            if param in states:
                self._local_states[local] = {name: _alias(value) for name, value in states[param].items()}
        self._without_states = [param for param in self._params if not states.get(param)]

    def _drop(self) -> None:
        """Release all states; ``current`` returns False from now on."""
        self._unwrapped, self._local_states, self._listed = [], defaultdict(dict), None

    @staticmethod
    def eligible(optimizer: torch.optim.Optimizer, kinds: Iterable[type]) -> bool:
        """Return whether a step on local tensors is bit-identical to one on ``DTensor``.

        Args:
            optimizer: The optimizer.
            kinds: Types of elementwise optimizers whose states are tensors that they update in place.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return (
            type(optimizer) in kinds
            and not getattr(optimizer, "master_weights", False)
            and not getattr(optimizer, "_scales", None)  # FusedAdam's scales of low-precision states
            and bool(params)
            and not hooks_of(optimizer)
            and all(isinstance(param, DTensor) for param in params)
            and all(torch.is_tensor(value) for state in optimizer.state.values() for value in state.values())
        )

    def current(self) -> bool:
        """Return whether a step can run on these tensors.

        Parameters and states must be unchanged, every parameter with a gradient must have states, and the optimizer
        must have no step hooks, which would see local tensors.
        """
        groups, states = self._optimizer.param_groups, self._optimizer.state
        values = values_of(states.values())
        return (
            len(groups) == len(self._groups)
            and all(same(group["params"], params) for group, params in zip(groups, self._groups, strict=True))
            and same(list(states), self._with_states)
            and len(values) == len(self._values)
            and all(map(is_, values, map(call, self._values)))
            and all(map(is_, map(_LOCAL, chain(self._params, compress(values, self._is_wrapped))), self._unwrapped))
            and gradients_of(self._without_states, self._name) == [None] * len(self._without_states)
            and not hooks_of(self._optimizer)
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager that gives the optimizer the local tensors; the caller must run exactly one step in it."""
        optimizer = self._optimizer
        name, states = self._name, optimizer.state
        keys = "params", "foreach"
        own = [(group, {key: group[key] for key in keys if key in group}) for group in optimizer.param_groups]
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
        try:
            optimizer.state = self._local_states
            for (group, _), params in zip(own, groups, strict=True):
                group["params"] = list(params)
                if group.get("foreach", False) is None:
                    group["foreach"] = False  # as torch chooses for DTensor: other kernels may round differently
            with step:
                yield
        finally:
            optimizer.state = states
            for group, before in own:
                group.update(before)
            for local, _ in given:
                setattr(local, name, None)

    def _listed_step(self, grads: list[Any]) -> ListedStep | None:
        """Return the ``ListedStep`` of ``grads`` to record or to replay; None if its lists cannot be reused."""
        if LAUNCH not in vars(self._optimizer):  # not ``FusedAdam``
            return None
        if self._listed is not None and self._listed.are(grads):
            return self._listed if self._listed.complete else None  # incomplete lists stay incomplete
        self._listed = ListedStep(self._optimizer, self._local_groups, grads) if stay(grads) else None
        return self._listed


def _alias(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor that aliases ``value`` without keeping it alive."""
    return value._local_tensor if isinstance(value, DTensor) else value.detach()


def hooks_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the step hooks of ``optimizer``, including torch's global ones."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    of_all = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    return [hook for hooks in (*own, *of_all) for hook in hooks.values()]


def local_tensor(value: Any) -> Any:
    """Return the local tensor of a ``DTensor``, and any other value unchanged."""
    return getattr(value, "_local_tensor", value)


def gradients_of(params: Sequence[Any], name: str) -> list[Any]:
    """Return each parameter's attribute ``name`` (``grad`` or ``decoupled_grad``), None if missing."""
    return list(map(_GRAD, params)) if name == "grad" else [getattr(param, name, None) for param in params]


def stay(grads: Iterable[Any]) -> bool:
    """Return whether all ``grads`` are the same objects in every step; see ``OptimizerGradients``."""
    return all(getattr(grad, "stays", False) for grad in grads if grad is not None)
