"""One pool for static tensors that graphs use in turn: inputs, gradients of outputs, buffers of local graphs."""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Lease[Buffers]:
    """Static tensors that a ``BufferPool`` has made, from one borrower to the next.

    Attributes:
        key: What they have in common with those that may take their place.
        buffers: The tensors.
        holders: How many hold them; 0 while they are free.
    """

    key: Hashable
    buffers: Buffers
    holders: int = 0


class BufferPool[Buffers]:
    """Lends static tensors by key; those that were freed first are lent first.

    Everything happens in the order in which the graphs will be replayed. Releasing tensors asserts that no replay from
    that point of the order on, other than those of the next borrower, reads or writes them.
    """

    def __init__(self) -> None:
        self._free: defaultdict[Hashable, deque[Lease[Buffers]]] = defaultdict(deque)

    def acquire(self, key: Hashable, make: Callable[[], Buffers]) -> Lease[Buffers]:
        """Return tensors for ``key`` with one holder: free ones, or what ``make`` returns."""
        free = self._free[key]
        lease = free.popleft() if free else Lease(key, make())
        lease.holders = 1
        return lease

    def retain(self, lease: Lease[Buffers]) -> None:
        """Add a holder.

        Raises:
            ValueError: the tensors are free.
        """
        if not lease.holders:
            raise ValueError("static memory is used after it was given back")
        lease.holders += 1

    def release(self, lease: Lease[Buffers]) -> None:
        """Remove a holder; without any the tensors are free for the next ``acquire`` with their key.

        Raises:
            ValueError: they are free already.
        """
        if not lease.holders:
            raise ValueError("static memory is given back twice")
        lease.holders -= 1
        if not lease.holders:
            self._free[lease.key].append(lease)

    def free(self) -> list[Buffers]:
        """Return what is free at this moment."""
        return [lease.buffers for leases in self._free.values() for lease in leases]
