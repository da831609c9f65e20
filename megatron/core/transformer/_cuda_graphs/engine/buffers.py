"""One pool for static tensors that graphs use in turn: inputs, gradients of outputs, buffers of local graphs."""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Lease[Buffers]:
    """Static tensors of a ``BufferPool``, with the number of those that use them.

    Attributes:
        key: Requests with an equal key may be served by these tensors.
        holders: How many hold them; 0 while they are free.
    """

    key: Hashable
    buffers: Buffers
    holders: int = 0


class BufferPool[Buffers]:
    """Lends static tensors by key, first freed first.

    Calls must come in the order in which the graphs will be replayed. Releasing tensors asserts that from then on only
    replays of their next holder read or write them.
    """

    def __init__(self) -> None:
        self._free: defaultdict[Hashable, deque[Lease[Buffers]]] = defaultdict(deque)

    def acquire(self, key: Hashable, make: Callable[[], Buffers]) -> Lease[Buffers]:
        """Return free tensors for ``key``, or new ones from ``make``, with one holder."""
        free = self._free[key]
        lease = free.popleft() if free else Lease(key, make())
        lease.holders = 1
        return lease

    def retain(self, lease: Lease[Buffers]) -> None:
        """Add a holder; a ``ValueError`` if the tensors are free."""
        if not lease.holders:
            raise ValueError("static memory is used after it was given back")
        lease.holders += 1

    def release(self, lease: Lease[Buffers]) -> None:
        """Remove a holder; after the last one the tensors are free for the next ``acquire`` with their key.

        Raises:
            ValueError: they are free already.
        """
        if not lease.holders:
            raise ValueError("static memory is given back twice")
        lease.holders -= 1
        if not lease.holders:
            self._free[lease.key].append(lease)

    def free(self) -> list[Buffers]:
        """Return the tensors that are free."""
        return [lease.buffers for leases in self._free.values() for lease in leases]
