"""What a token dispatcher keeps from one part of an MoE layer to the next: shapes, counts, splits."""

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

    def __enter__(self) -> None:
        """Begin a pass of another shape, which changes them."""

    def __exit__(self, *error: object) -> None:
        self.restore()
