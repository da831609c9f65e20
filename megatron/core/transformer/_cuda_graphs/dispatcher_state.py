"""What a token dispatcher keeps from one part of an MoE layer to the next: shapes, counts, splits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class DispatcherState:
    """The attributes of the token dispatcher of ``layer``, if it has one, and of its communication manager, as now.

    A replay runs no code of the parts that the graph holds, so what is eager after it reads what they set at capture.
    """

    def __init__(self, layer: Any):
        dispatcher = getattr(getattr(layer, "mlp", None), "token_dispatcher", None)
        owners = (dispatcher, getattr(dispatcher, "_comm_manager", None))
        self._kept = [(vars(owner), dict(vars(owner))) for owner in owners if owner is not None]

    def restore(self) -> None:
        """Set the attributes as they were."""
        for attributes, values in self._kept:
            attributes.clear()
            attributes.update(values)


@contextmanager
def preserve_dispatcher_state(layer: Any) -> Iterator[None]:
    """Restore the ``DispatcherState`` of ``layer`` at the end: passes of another shape change it."""
    state = DispatcherState(layer)
    try:
        yield
    finally:
        state.restore()
