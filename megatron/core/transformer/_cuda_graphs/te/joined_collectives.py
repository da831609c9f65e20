"""Collectives that all ranks launch in a capture, or none.

A rank that fails would leave the others waiting in its next collective, of Megatron-FSDP's hooks or, in warm-up, of a
layer under tensor, expert or context parallelism. So all ranks agree right before each. Collectives that a stream
capture records wait for no one.

Python launches collectives through the methods of ``ProcessGroup``, which are replaced here. A ``TorchDispatchMode``
would not see where a batch of sends and receives begins, and ``torch.compile`` compiles nothing under one. Functional
collectives do not pass here; neither megatron-core nor TransformerEngine has any in layers. Nor does what communicates
without process groups: TransformerEngine's userbuffers (``--tp-comm-overlap``), DeepEP.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import torch
from torch.distributed import ProcessGroup, distributed_c10d

from ..launches import launches_of
from ..replacements import Replacements


def _present(*names: str) -> tuple[str, ...]:
    return tuple(name for name in names if hasattr(ProcessGroup, name))


# Methods of torch 2.11 to 2.15; the first argument of these holds the tensors that they write.
WRITING = _present(
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "gather_into_tensor", "gather_single"),
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)
BARRIERS = _present("barrier", "monitored_barrier")
BETWEEN_TWO = _present("send", "recv", "recv_anysource")
BEGIN_BATCH, END_BATCH = "_start_coalescing", "_end_coalescing"
_COLLECTIVES = {*WRITING, *BARRIERS}


@contextmanager
def joined_collectives(join: Callable[[], object]) -> Iterator[None]:
    """Call ``join`` before each collective that is launched in this context outside of stream captures.

    Args:
        join: Returns once all ranks are about to launch as many collectives as this one; raises if none is to launch
            this one.
    """
    batches: set[ProcessGroup] = set()  # groups with an open batch, which is launched as a whole
    thread = threading.get_ident()

    def joins(group: ProcessGroup) -> bool:
        # Other threads than this one and autograd's have nothing to do with the capture.
        of_capture = threading.get_ident() == thread or torch._C._current_graph_task_id() != -1
        return of_capture and group.size() > 1 and not torch.cuda.is_current_stream_capturing()

    def joined(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes the place of the method ``call`` of process groups."""

        @wraps(call)
        def launch(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if name == END_BATCH:
                batches.discard(group)
            elif group not in batches:
                if name == BEGIN_BATCH:
                    batches.add(group)
                if joins(group):
                    join()
                    if name in _COLLECTIVES:
                        return _launch_surely(call, group, args, kwargs)
            return call(group, *args, **kwargs)

        return launch

    methods = Replacements()
    for name in (*_COLLECTIVES, *BETWEEN_TWO, BEGIN_BATCH, END_BATCH):
        methods.add(ProcessGroup, name, joined(name, getattr(ProcessGroup, name)))
    try:
        with methods:
            yield
    finally:  # torch must forget batches that an exception left open, or it would collect later collectives in them
        for group in batches:
            distributed_c10d._world.pg_coalesce_state.pop(group, None)


def _launch_surely(call: Callable[..., Any], group: ProcessGroup, args: Any, kwargs: Any) -> Any:
    """Launch a collective that all others launch too. If that fails, launch it before the exception goes on.

    Not for sends and receives: torch does not count these, so nothing tells whether one was launched.
    """
    launched = launches_of(group)
    try:
        return call(group, *args, **kwargs)
    except BaseException:
        if not launched():
            with suppress(Exception):
                work = call(group, *args, **kwargs)
                if work is not None:
                    work.wait()
        raise
