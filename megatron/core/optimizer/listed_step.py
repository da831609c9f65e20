"""The step of a fused Adam with the lists of tensors of an earlier step.

TransformerEngine's ``FusedAdam`` asks every parameter, its gradient and its states about themselves in each step, to
list them for one launch a group. ``ListedStep`` keeps those lists. In later steps the optimizer has one parameter of
each group, and a launch gets the lists of all: what else a step does, and every number that it computes with, stays the
optimizer's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch

from .kept_gradients import KeptGradients

Lists = list[list[torch.Tensor]]
LAUNCH = "multi_tensor_adam"  # FusedAdam's attribute: a function of a chunk size, a flag, lists of tensors and numbers


class ListedStep(KeptGradients):
    """The launches of an optimizer's step, for later steps with the same tensors.

    Attributes:
        complete: Whether ``record`` has seen launches that hold every gradient, and nothing but what the optimizer
            owns. A step that also casts its states, say, is not complete.
        leaders: Of each group one parameter, in a list: the first with a gradient, or else any, as some versions of
            ``FusedAdam`` do not count the steps of an empty group.
        led: Each of them that has a gradient, and the local tensor of that.
    """

    def __init__(self, optimizer: Any, params: Sequence[list[torch.Tensor]], grads: list[Any]):
        """Prepare to record.

        Args:
            optimizer: The optimizer; ``possible`` holds for it.
            params: The parameters of each of its groups, not ``DTensor``s.
            grads: The gradient of each parameter, one group after another, ``DTensor``s for which ``stay`` holds.
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
        self._launches: list[list[Lists]] = []  # of each group with gradients

    @staticmethod
    def possible(optimizer: Any) -> bool:
        """Whether ``optimizer`` launches as ``FusedAdam`` does. No hook may look at its parameters in a step."""
        return LAUNCH in vars(optimizer)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Within it, the optimizer runs its step on all parameters, and its launches are noted."""
        seen: list[Lists] = []

        def launch(chunk_size: int, flag: torch.Tensor, lists: Lists, *numbers: Any) -> Any:
            seen.append(list(map(list, lists)))
            return original(chunk_size, flag, lists, *numbers)

        with self._launching(launch) as original:
            yield
        states = (state.values() for state in self._optimizer.state.values())
        groups = (group["params"] for group in self._optimizer.param_groups)
        owned = {tensor.data_ptr() for tensor in chain(*states, *groups, self.local) if tensor is not None}
        used = {tensor.data_ptr() for lists in seen for tensor in chain(*lists)}
        self.complete = self._divide(seen) and used <= owned
        if not self.complete:
            self._launches = []  # which may hold more than the optimizer does

    def _divide(self, seen: list[Lists]) -> bool:
        """Note which launches each group has; return whether they hold as many tensors as there are gradients."""
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
        """Within it, the optimizer runs its step on ``leaders``, which changes all parameters.

        Raises RuntimeError at its end if the step did not launch once for each group with gradients.
        """
        launched = 0

        def launch(chunk_size: int, flag: torch.Tensor, _: Lists, *numbers: Any) -> None:
            nonlocal launched
            launched += 1
            for lists in self._launches[launched - 1] if launched <= len(self._launches) else ():
                original(chunk_size, flag, lists, *numbers)

        with self._launching(launch) as original:
            yield
        if launched != len(self._launches):
            raise RuntimeError(f"{type(self._optimizer).__name__}.step did not call {LAUNCH} as in the steps before")

    @contextmanager
    def _launching(self, launch: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """Within it, the optimizer launches by ``launch``. Yields by what it did before."""
        own = vars(self._optimizer)
        original = own[LAUNCH]
        own[LAUNCH] = launch
        try:
            yield original
        finally:
            own[LAUNCH] = original
