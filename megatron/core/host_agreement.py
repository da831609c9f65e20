"""Combine flags of all ranks by host messages instead of GPU collectives.

A GPU collective would block the hosts: while the GPU runs a multi-stream graph of a whole backward pass, it may be
unable to start any other work, even a copy of four bytes, until almost all of the graph has started.
"""

import sys
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state

TAG = 0x4A71  # plus the distance; other users of the group mostly send with tag 0


class HostAgreement:
    """Computes the logical OR of flags over all ranks, which must call ``any`` equally often with equally many flags.

    Each rank sends and receives ceil(log2(ranks)) messages: in round k it sends all flags seen so far to the rank 2^k
    after it, and receives the flags seen by the rank 2^k before it. This is the dissemination barrier of Hensgen,
    Finkel and Manber ("Two algorithms for barrier synchronization", 1988), with flags as the payload.

    Args:
        group: A gloo process group of all ranks. Its timeout applies to each message.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group: Any = weakref.proxy(group)  # the group may be destroyed before this object
        self._options = group._get_backend(torch.device("cpu")).options
        self._expected: dict[int, tuple[torch.Tensor, Any]] = {}  # by distance

    def expect(self) -> None:
        """Post the receives of the next ``any`` early (optional), so that messages arrive before this rank calls it.

        gloo sends a message only once its receive is posted, so the last rank would otherwise wait for every message.
        If a rank has exited, ``any`` raises the error.
        """
        for distance in self._distances():
            if distance not in self._expected:
                with suppress(RuntimeError):
                    self._expected[distance] = self._receive(distance)

    def _distances(self) -> Iterator[int]:
        distance = 1
        while distance < self._group.size():
            yield distance
            distance *= 2

    def _peer(self, distance: int) -> int:
        return (self._group.rank() + distance) % self._group.size()

    def _receive(self, distance: int) -> tuple[torch.Tensor, Any]:
        heard = torch.zeros(1, dtype=torch.int64, device="cpu")
        return heard, self._group.recv([heard], self._peer(-distance), TAG + distance)

    def any(self, flags: Sequence[bool]) -> tuple[bool, ...]:
        """Return the logical OR of each flag over all ranks, for at most 63 flags.

        Raises:
            RuntimeError: Another rank has exited or did not answer in time.
        """
        known = sum(flag << place for place, flag in enumerate(flags))
        for distance in self._distances():
            known |= self._exchange(known, distance)
        return tuple(bool(known >> place & 1) for place in range(len(flags)))

    def _exchange(self, known: int, distance: int) -> int:
        """Send ``known`` to rank + ``distance``, and return the flags of rank - ``distance`` (modulo group size)."""
        timeout = self._options._timeout
        after, before = self._peer(distance), self._peer(-distance)
        told = torch.tensor([known], dtype=torch.int64, device="cpu")
        peer = after
        try:
            sent = self._group.send([told], after, TAG + distance)
            peer = before
            heard, received = self._expected.pop(distance) if distance in self._expected else self._receive(distance)
            received.wait(timeout)
            peer = after
            sent.wait(timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {peer} did not answer when ranks agreed on whether to rerun the step: {error}. Look for its "
                f"error, or the error of a rank it waits for. If it was only slow, raise the timeout ({timeout}) with "
                "--distributed-timeout-minutes (--distributed-timeout-seconds-after-init)."
            ) from error
        return int(heard)


_agreements: MutableMapping[dist.ProcessGroup, HostAgreement] = weakref.WeakKeyDictionary()


def agreement_of_all_ranks() -> HostAgreement | None:
    """Return the ``HostAgreement`` on Megatron's data-parallel gloo group, or None if that group cannot be used.

    The group does not exist with ``--disable-gloo-process-groups``, with GTP weight rematerialization, or before
    ``initialize_model_parallel``; under tensor or pipeline parallelism it does not span all ranks. It is not used with
    ``--inprocess-restart``, which can interrupt waits on devices but not on hosts.
    """
    group = parallel_state._DATA_PARALLEL_GROUP_WITH_CP_GLOO
    if group is None or group not in dist.distributed_c10d._world.pg_map:  # left over from a destroyed world
        return None
    if dist.get_backend(group) != "gloo" or group.size() < dist.get_world_size():
        return None
    if "nvidia_resiliency_ext.inprocess" in sys.modules:
        return None
    if group not in _agreements:  # all callers share one object, so that messages arrive in order
        _agreements[group] = HostAgreement(group)
    return _agreements[group]
