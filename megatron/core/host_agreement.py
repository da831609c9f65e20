"""Ranks that agree on what their hosts know, by messages between the hosts.

A collective on the device can keep hosts waiting: while it runs the graph of a model's backward pass, which has several
streams, it may begin nothing that others hold, a copy of four bytes included, until it has taken in almost all of it.
"""

import sys
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state

TAG = 0x4A71  # of messages, plus their distance: others may send by the same group, most with tag 0


class HostAgreement:
    """Agreement of all ranks, which must call ``any`` equally often and with as many flags.

    A rank sends and receives ceil(log2(ranks)) messages: in round k it tells the rank 2^k after it all that it knows,
    and hears from the rank 2^k before it. That is the dissemination barrier of Hensgen, Finkel and Manber ("Two
    algorithms for barrier synchronization", 1988), whose messages carry flags here.

    Args:
        group: A process group of all ranks, of the gloo backend. Its timeout is how long a rank is waited for.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group: Any = weakref.proxy(group)  # which may be destroyed before its agreement
        self._options = group._get_backend(torch.device("cpu")).options
        self._expected: dict[int, tuple[torch.Tensor, Any]] = {}  # by distance

    def expect(self) -> None:
        """Make ready to hear from other ranks; optional. What they tell then travels before this rank calls ``any``.

        gloo sends a message when it is expected, so the last rank would wait for those of all others. If one is gone,
        ``any`` says so.
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
        """Return for each of ``flags``, at most 63, whether it is True on any rank.

        Raises:
            RuntimeError: another rank is gone, or did not answer in time.
        """
        known = sum(flag << place for place, flag in enumerate(flags))
        for distance in self._distances():
            known |= self._exchange(known, distance)
        return tuple(bool(known >> place & 1) for place in range(len(flags)))

    def _exchange(self, known: int, distance: int) -> int:
        """Tell the rank that is ``distance`` after this one, and return what the one as far before it tells."""
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
                f"rank {peer} did not answer as ranks agreed on whether to run the step again: {error}. Look for "
                f"its error, or for that of a rank it waits for. If one was only late, for more than {timeout}, raise "
                "--distributed-timeout-minutes (--distributed-timeout-seconds-after-init)."
            ) from error
        return int(heard)


_agreements: MutableMapping[dist.ProcessGroup, HostAgreement] = weakref.WeakKeyDictionary()


def agreement_of_all_ranks() -> HostAgreement | None:
    """Return how all ranks agree through Megatron's gloo group of data-parallel ranks; None where they cannot.

    They cannot where Megatron made no such group (``--disable-gloo-process-groups``, GTP weight rematerialization,
    before ``initialize_model_parallel``), nor under tensor or pipeline parallelism, where it lacks ranks. They do not
    with ``--inprocess-restart``, which ends waits for devices, but not those for hosts.
    """
    group = parallel_state._DATA_PARALLEL_GROUP_WITH_CP_GLOO
    if group is None or group not in dist.distributed_c10d._world.pg_map:  # which a new world leaves behind
        return None
    if dist.get_backend(group) != "gloo" or group.size() < dist.get_world_size():
        return None
    if "nvidia_resiliency_ext.inprocess" in sys.modules:
        return None
    if group not in _agreements:  # one for all, as each hears what was told first
        _agreements[group] = HostAgreement(group)
    return _agreements[group]
