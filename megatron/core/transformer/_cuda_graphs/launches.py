"""Detect whether this rank has launched a collective."""

from collections.abc import Callable

import torch


def launches_of(group: torch.distributed.ProcessGroup) -> Callable[[], bool]:
    """Return a function that checks whether this rank launched a collective of ``group`` since its creation."""
    if torch.distributed.get_backend(group) == "fake":  # neither communicates nor counts collectives
        return lambda: True
    before = group._get_sequence_number_for_group()
    return lambda: group._get_sequence_number_for_group() != before
