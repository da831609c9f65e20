"""Combine flags of all ranks by host messages instead of GPU collectives.

A GPU collective would block the hosts: while the GPU runs a multi-stream graph of a whole backward pass, it may be
unable to start any other work, even a copy of four bytes, until almost all of the graph has started.
"""

import os
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core import parallel_state

_T = TypeVar("_T")


class HostAgreement:
    """Computes the logical OR of flags over all ranks, which must call ``any`` equally often with equally many flags.

    Each rank sends and receives ceil(log2(ranks)) messages: in round k it sends all flags seen so far to the rank 2^k
    after it, and receives the flags seen by the rank 2^k before it. This is the dissemination barrier of Hensgen,
    Finkel and Manber ("Two algorithms for barrier synchronization", 1988), with flags as the payload. A rank
    connects only to ranks that it exchanges messages with. GLOO_SOCKET_IFNAME selects the network interface.

    Args:
        group: The process group of the ranks; its timeout applies to each message. Ranks do not communicate if it has
            one rank or torch's ``fake`` backend.

    Attributes:
        size: The number of ranks that communicate.
        calls: How often ``any`` has returned.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._ranks = dist.get_process_group_ranks(group)
        device = torch.device(distributed_c10d._get_object_coll_device(group))
        self._options: Any = group._get_backend(device).options  # not the group: it may be destroyed before this object
        self._expected: dict[int, tuple[torch.Tensor, Any]] = {}  # by distance
        self._error: RuntimeError | None = None
        self.calls, self.size = 0, 1 if dist.get_backend(group) == "fake" else group.size()
        if self.size > 1:
            gloo: Any = dist.ProcessGroupGloo
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
            options = gloo._Options()
            options._timeout = self._options._timeout
            network = gloo.create_device(interface=interface, lazy_init=True) if interface else None
            options._devices = [network or gloo.create_default_device(lazy_init=True)]
            store = dist.PrefixStore(f"host_agreement/{group.group_name}", distributed_c10d._get_default_store())
            self._gloo = gloo(store, group.rank(), self.size, options)
            # The first message to or from a rank waits until both have connected: wait for no other message before.
            first = [self._post(0, distance) for distance in self._distances()]
            for exchange in first:
                self._finish(*exchange)

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
        while distance < self.size:
            yield distance
            distance *= 2

    def _peer(self, distance: int) -> int:
        return (self._gloo.rank() + distance) % self.size

    def _receive(self, distance: int) -> tuple[torch.Tensor, Any]:
        heard = torch.zeros(1, dtype=torch.int64, device="cpu")
        return heard, self._gloo.recv([heard], self._peer(-distance), distance)

    def any(self, flags: Sequence[bool]) -> tuple[bool, ...]:
        """Return the logical OR of each flag over all ranks, for at most 63 flags.

        Raises:
            RuntimeError: Another rank has exited or did not answer in time, now or in an earlier call.
        """
        if self._error is not None:
            raise self._error
        known = sum(flag << place for place, flag in enumerate(flags))
        for distance in self._distances():
            known |= self._finish(*self._post(known, distance))
        self.calls += 1
        return tuple(bool(known >> place & 1) for place in range(len(flags)))

    def _post(self, known: int, distance: int) -> tuple[int, torch.Tensor, Any, torch.Tensor, Any]:
        """Start sending ``known`` to rank + ``distance`` and receiving from rank - ``distance`` (modulo group size)."""
        told, peer = torch.tensor([known], dtype=torch.int64, device="cpu"), self._peer(distance)
        sent = self._naming(peer, lambda: self._gloo.send([told], peer, distance))
        if distance not in self._expected:
            self._expected[distance] = self._naming(self._peer(-distance), lambda: self._receive(distance))
        return distance, told, sent, *self._expected.pop(distance)

    def _finish(self, distance: int, told: torch.Tensor, sent: Any, heard: torch.Tensor, received: Any) -> int:
        """Wait for an exchange, given the result of ``_post``, and return the received flags."""
        self._naming(self._peer(-distance), lambda: received.wait(self._options._timeout))
        self._naming(self._peer(distance), lambda: sent.wait(self._options._timeout))
        return int(heard)

    def _naming(self, peer: int, call: Callable[[], _T]) -> _T:
        """Return ``call()``; if it fails, raise an error that names the group rank ``peer``."""
        try:
            return call()
        except RuntimeError as error:
            self._error = RuntimeError(
                f"rank {self._ranks[peer]} exited, or did not answer within {self._options._timeout}, in a vote "
                f"of the hosts: {error}. Look for its error, or the error of a rank it waits for. If it was only slow, "
                "raise the timeout with --distributed-timeout-minutes (--distributed-timeout-seconds-after-init). If "
                "the hosts cannot connect, set GLOO_SOCKET_IFNAME to the name of a network interface."
            )
            raise self._error from error


_agreements: MutableMapping[dist.ProcessGroup, HostAgreement] = weakref.WeakKeyDictionary()


def agreement_of(group: dist.ProcessGroup) -> HostAgreement:
    """Return the ``HostAgreement`` of ``group``. All callers share it, so that messages arrive in order."""
    if group not in _agreements:
        _agreements[group] = HostAgreement(group)
    return _agreements[group]


def agreement_of_all_ranks() -> HostAgreement | None:
    """Return the ``HostAgreement`` of all ranks, or None if hosts should not exchange messages in each step.

    It is None with ``--disable-gloo-process-groups``, before ``initialize_model_parallel``, and with
    ``--inprocess-restart``, which can interrupt waits on devices but not on hosts.
    """
    if not dist.is_initialized() or parallel_state._DATA_PARALLEL_GROUP_WITH_CP_GLOO is None:
        return None
    if "nvidia_resiliency_ext.inprocess" in sys.modules:
        return None
    return agreement_of(dist.group.WORLD)
