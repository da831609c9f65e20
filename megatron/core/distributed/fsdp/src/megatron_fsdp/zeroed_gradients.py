"""Whether the main gradients are zero already: a training step zeroes them twice, by the model and by the optimizer."""

from operator import is_
from typing import Any

import torch


class ZeroedGradients:
    """Knows whether anything may have written the main gradients of a model since they were zeroed."""

    def __init__(self, fsdp: torch.nn.Module):
        self._fsdp = fsdp
        self._noted: tuple[list[Any], list[int]] | None = None  # where they are, and the version of each
        self._in_a_graph = False

    def zeroed(self) -> None:
        """Note that all gradients were zeroed just now, or will be where a graph captures that."""
        unknown = self._in_a_graph or torch.cuda.is_current_stream_capturing()
        self._noted = None if unknown else self._current()

    def written(self) -> None:
        """Note that gradients may have been written.

        If a graph captures this, its replays will write them unseen, so they never count as zero from now on.
        """
        self._in_a_graph |= torch.cuda.is_current_stream_capturing()
        self._noted = None

    def are_zero(self) -> bool:
        """Whether gradients are zero: there was no backward pass since ``zeroed``, no ``written``, nor a direct write.

        Communication libraries and replayed graphs write without changing a tensor's version; they do so in a backward
        pass. Within a capture they never are: its replays may come after other steps.
        """
        if self._noted is None or self._fsdp.microbatch_count or self._fsdp.fsdp_hooks.in_backward:
            return False
        if torch.cuda.is_current_stream_capturing():
            return False
        (data, versions), (noted, noted_versions) = self._current(), self._noted
        return versions == noted_versions and all(map(is_, data, noted))

    def _current(self) -> tuple[list[Any], list[int]]:
        groups = self._fsdp.param_and_grad_buffer.parameter_groups
        buffers = [buffer for group in groups for buffer in (group.main_grad_buffer, group.hfsdp_helper_gbuf)]
        data = [buffer.data for buffer in buffers if buffer is not None]
        return data, [each._version for each in data]
