"""Collectives that finish where they are launched, and hand out their results at ``wait``.

gloo completes a collective in threads of its own, which free its tensors beside the main thread; processes that trained
for long died of heap corruption there. Here the launching thread waits instead. A collective with ``async_op=True``
works on private memory: until ``wait()`` its outputs hold NaN (integers and bools: zero), so a forgotten wait shows.
Sends and receives stay asynchronous: pipeline stages launch them in different orders. Sends that nobody waits for are
kept: gloo drops them with the objects that stand for them, and NCCL sends them all the same.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.utils._pytree import tree_map_only

from .patches import wrap
from .pools import poison
from .tape import tensors_in

# Methods of ProcessGroup, in torch 2.11 to 2.15, whose first argument holds the tensors that they write.
_NAMES = (
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "gather_into_tensor", "gather_single"),
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)
WRITING = tuple(name for name in _NAMES if hasattr(dist.ProcessGroup, name))

_unfinished_sends: defaultdict[tuple[str, int, int], list[dist.Work]] = defaultdict(list)


class HeldWork(dist.Work):
    """A collective that is done, with the results it has yet to hand out.

    ``wait``, ``synchronize``, ``block_current_stream``, ``is_completed``, ``is_success`` and ``get_future`` copy them
    into the caller's tensors: on a GPU too a program may read them after each of these.
    """

    def __init__(self, outputs: Iterable[torch.Tensor] = (), results: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._held = list(zip(outputs, results, strict=True))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Hand out the results; true."""
        held, self._held = self._held, []
        for output, result in held:
            output.data.copy_(result)  # .data: collectives do not raise a tensor's version
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.wait()

    def is_success(self) -> bool:
        return self.wait()

    def get_future(self) -> torch.futures.Future:
        """A completed future of the output tensors."""
        future: torch.futures.Future = torch.futures.Future()
        outputs = [output for output, _ in self._held]
        self.wait()
        future.set_result(outputs)
        return future


def _launch(call: Callable, group: dist.ProcessGroup, written: Any, *args: Any, **kwargs: Any) -> HeldWork:
    if any(getattr(options, "asyncOp", None) is False for options in (*args, *kwargs.values())):
        call(group, written, *args, **kwargs).wait()
        return HeldWork()
    with torch.no_grad():
        results = tree_map_only(torch.Tensor, torch.clone, written)
        call(group, results, *args, **kwargs).wait()
        outputs = tensors_in(written)
        # gathered in place, a rank's own part is its input, which NCCL leaves alone
        own = [(t.data, t.clone()) for t in tensors_in(args)] if "gather" in call.__name__ else []
        for output in outputs:
            poison(output.data)
        for tensor, value in own:
            tensor.copy_(value)
    return HeldWork(outputs, tensors_in(results))


def _launch_barrier(call: Callable, group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> HeldWork:
    call(group, *args, **kwargs).wait()
    return HeldWork()


def _launch_send(
    call: Callable, group: dist.ProcessGroup, tensors: list[torch.Tensor], rank: int, tag: int
) -> dist.Work:
    sends = _unfinished_sends[group.group_name, rank, tag]
    # A rank receives in the order of sends: what precedes a finished one is finished, waited for or not.
    finished = [index for index, work in enumerate(sends) if work.is_completed()]
    del sends[: finished[-1] + 1 if finished else 0]
    sends.append(call(group, tensors, rank, tag))
    return sends[-1]


def _wait_and_wrap(call: Callable, tensor: torch.Tensor) -> torch.Tensor:
    return call(functional.wait_tensor(tensor))


def install() -> None:
    """Wait for every collective of process groups, and every functional one, where it is launched."""
    why = "gloo's threads do not free tensors beside the main thread; results are handed out at wait()"
    for name in WRITING:
        wrap(dist.ProcessGroup, name, _launch, why)
    wrap(dist.ProcessGroup, "barrier", _launch_barrier, why)
    wrap(dist.ProcessGroup, "send", _launch_send, "gloo drops a send that nobody waits for")
    wrap(functional, "_maybe_wrap_tensor", _wait_and_wrap, why)
