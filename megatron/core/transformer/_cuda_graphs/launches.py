"""Detects whether this rank has launched a collective, which the other ranks would wait for."""

from collections.abc import Callable

import torch


def launches_of(group: torch.distributed.ProcessGroup) -> Callable[[], bool]:
    """Return a function that returns whether a collective of ``group`` was launched since this call."""
    if torch.distributed.get_backend(group) == "fake":  # communicates and counts nothing
        return lambda: True
    before = group._get_sequence_number_for_group()
    return lambda: group._get_sequence_number_for_group() != before
