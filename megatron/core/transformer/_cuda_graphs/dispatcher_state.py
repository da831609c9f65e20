"""What a token dispatcher keeps from one part of an MoE layer to the next: shapes, counts, splits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def preserve_dispatcher_state(layer: Any) -> Iterator[None]:
    """Restore the attributes of the token dispatcher of ``layer``, if it has one, and of its communication manager.

    A replay runs no code of the parts that the graph holds, so what is eager after it reads what they set at capture.
    An eager pass of another shape in between would change that.
    """
    dispatcher = getattr(getattr(layer, "mlp", None), "token_dispatcher", None)
    if dispatcher is None:
        yield
        return
    kept = [vars(each) for each in (dispatcher, getattr(dispatcher, "_comm_manager", None)) if each is not None]
    before = [dict(attributes) for attributes in kept]
    try:
        yield
    finally:
        for attributes, values in zip(kept, before, strict=True):
            attributes.clear()
            attributes.update(values)
