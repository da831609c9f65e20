"""Ranks that agree on what their hosts know, by messages between the hosts.

A collective on the device can keep hosts waiting: while a CUDA graph runs, the device may begin nothing that other
streams hold, a copy of four bytes included, until it has taken in almost all of the graph.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.core import parallel_state


class HostAgreement:
    """Agreement of the ranks of ``group``; all must call ``any`` equally often and with as many flags.

    A rank sends and receives ceil(log2(ranks)) messages: in round k it tells the rank 2^k after it all that it knows,
    and hears from the rank 2^k before it. That is the dissemination barrier of Hensgen, Finkel and Manber ("Two
    algorithms for barrier synchronization", 1988), whose messages carry flags here.

    Args:
        group: A process group of the gloo backend.
        timeout: How long to wait for a rank.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta):
        self._group, self._timeout = group, timeout

    def any(self, flags: Sequence[bool]) -> tuple[bool, ...]:
        """Return for each of ``flags``, at most 63, whether it is True on any rank.

        Raises:
            RuntimeError: another rank is gone, or was not heard of in time.
        """
        group, known, distance = self._group, sum(flag << place for place, flag in enumerate(flags)), 1
        rank, ranks = group.rank(), group.size()
        while distance < ranks:
            before = (rank - distance) % ranks
            told, heard = (torch.tensor([known], dtype=torch.int64, device="cpu") for _ in range(2))
            sent = group.send([told], (rank + distance) % ranks, distance)
            received = group.recv([heard], before, distance)
            try:
                received.wait(self._timeout)
                sent.wait(self._timeout)
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank {before} did not answer: all ranks must agree on whether to run the step again. Look for "
                    f"its error; if it was only late, raise --distributed-timeout-minutes (now {self._timeout})."
                ) from error
            known |= int(heard)
            distance *= 2
        return tuple(bool(known >> place & 1) for place in range(len(flags)))


def agreement_of_all_ranks() -> HostAgreement | None:
    """Return how all ranks agree, all of which must call this; None if Megatron has no process groups of hosts.

    It has none with ``--disable-gloo-process-groups``, nor before ``initialize_model_parallel``.
    """
    of_hosts = parallel_state._DATA_PARALLEL_GROUP_WITH_CP_GLOO
    if of_hosts is None or dist.get_backend(of_hosts) != "gloo":
        return None
    timeout = of_hosts._get_backend(torch.device("cpu")).options._timeout
    return HostAgreement(dist.new_group(backend="gloo", timeout=timeout, group_desc="HOST_AGREEMENT"), timeout)
