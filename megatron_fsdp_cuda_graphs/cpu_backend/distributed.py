"""torch.distributed with gloo behind code that is written for NCCL.

gloo completes a collective in threads of its own, which free its tensors beside the main thread; processes that trained
for long died of heap corruption there. Here the launching thread waits instead. A collective with ``async_op=True``
works on private memory: until ``wait()`` its outputs hold NaN (integers and bools: zero), so a forgotten wait shows.
Sends and receives stay asynchronous: pipeline stages launch them in different orders. Sends that nobody waits for are
kept: gloo drops them with the objects that stand for them, and NCCL sends them all the same.
"""

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed import _functional_collectives as functional
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from . import streams
from .device import to_cpu
from .memory import poison
from .patches import patch, wrap, wrapping
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

_unfinished_sends: defaultdict[tuple[str, int, int], list[Work]] = defaultdict(list)


class HeldWork(Work):
    """A finished collective that copies its results into the caller's tensors when it is waited for."""

    def __init__(self, outputs: Iterable[torch.Tensor] = (), results: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._held = list(zip(outputs, results, strict=True))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Hand out the results; true."""
        held, self._held = self._held, []
        for output, result in held:
            output.data.copy_(result)  # .data: collectives do not raise a tensor's version
        return True

    # On a GPU too a program may read the outputs after each of these.
    synchronize = block_current_stream = is_completed = is_success = wait  # type: ignore[assignment]

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


def _launch_send(call: Callable, group: dist.ProcessGroup, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
    sends = _unfinished_sends[group.group_name, rank, tag]
    # A rank receives in the order of sends: what precedes a finished one is finished, waited for or not.
    finished = [index for index, work in enumerate(sends) if work.is_completed()]
    del sends[: finished[-1] + 1 if finished else 0]
    sends.append(call(group, tensors, rank, tag))
    return sends[-1]


def _wait_and_wrap(call: Callable, tensor: torch.Tensor) -> torch.Tensor:
    return call(functional.wait_tensor(tensor))


def _wait(call: Callable, work: Work, *args: Any) -> bool:
    if streams.current_capture() is None:
        return call(work, *args)
    with _disable_current_modes():
        return call(work, *args)


@dataclass(frozen=True)
class PremulSum:
    """NCCL's reduction that multiplies each rank's contribution by ``factor`` and adds them up."""

    factor: float | torch.Tensor


def _backend(name: str | None) -> str | None:
    """Return gloo for nccl, also in "cpu:gloo,cuda:nccl"; other backends stay.

    Raises:
        ValueError: a backend other than gloo, nccl or fake was asked for on the CUDA device.
    """
    if name is None:
        return None
    kinds = {part.split(":")[-1] for part in str(name).lower().split(",")}
    if kinds <= {"nccl", "gloo"}:
        return "gloo"
    if kinds == {"fake"}:
        return "fake"
    raise ValueError(f"backend={name!r} does not exist on the CPU backend: use gloo (or nccl, which becomes gloo)")


def _init_process_group(call: Callable, backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    kwargs.pop("device_id", None)
    kwargs.pop("pg_options", None)
    call(_backend(backend) or "gloo", *args, **kwargs)


def _new_group(
    call: Callable, ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, *args, **kwargs
) -> Any:
    kwargs.pop("device_id", None)
    return call(ranks, timeout, _backend(backend), None, *args, **kwargs)


@functools.cache
def _gloo_device(interface: str, process: int) -> Any:
    """The device of gloo for ``interface``, or the default one, in this process.

    Groups share it: each has a thread, which wakes a hundred times a second even if nothing comes.
    """
    gloo = dist.ProcessGroupGloo
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()


def _gloo_init(
    call: Callable, self: Any, store: Any, rank: int, size: int, timeout: Any = timedelta(minutes=30), **_: Any
) -> None:
    options = timeout
    if isinstance(timeout, timedelta):
        interfaces = list(filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")))
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [_gloo_device(name, os.getpid()) for name in interfaces or [""]]
        options._threads = 1
    call(self, store, rank, size, options)


def _scale(op: Any, group: Any) -> float | torch.Tensor | None:
    """What to multiply contributions with, for the reductions gloo does not have."""
    if isinstance(op, PremulSum):
        return op.factor
    if op == dist.ReduceOp.AVG:
        return 1.0 / dist.get_world_size(group)
    return None


def _all_reduce(call: Callable, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False) -> Any:
    scale = _scale(op, group)
    if scale is not None:
        tensor.mul_(scale)
        op = dist.ReduceOp.SUM
    return call(tensor, op, group, async_op)


def _reduce_scatter(call: Callable, output, input, op=dist.ReduceOp.SUM, group=None, async_op=False) -> Any:
    scale = _scale(op, group)
    if scale is not None:
        input = [t * scale for t in input] if isinstance(input, list) else input * scale
        op = dist.ReduceOp.SUM
    return call(output, input, op, group, async_op)


def _barrier(call: Callable, group=None, async_op=False, device_ids=None) -> Any:
    return call(group, async_op)


def _on_cpu_mesh(call: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call with "cpu" for each "cuda"."""
    cpu = ["cpu" if isinstance(arg, str) and arg == "cuda" else arg for arg in (*args, *kwargs.values())]
    return call(*cpu[: len(args)], **dict(zip(kwargs, cpu[len(args) :], strict=True)))


def _with_cpu_device(call: Callable, self: Any, device: Any, *args: Any) -> Any:
    return call(self, to_cpu(device), *args)


def install() -> None:
    """Map NCCL to gloo, its two extra reductions to arithmetic and a sum, and CUDA meshes to CPU meshes."""
    premul = "gloo has neither PREMUL_SUM nor AVG: contributions are scaled, then summed"
    replaced: dict[str, tuple[Callable, str]] = {
        "init_process_group": (_init_process_group, "nccl becomes gloo"),
        "new_group": (_new_group, "nccl becomes gloo"),
        "all_reduce": (_all_reduce, premul),
        "reduce_scatter_tensor": (_reduce_scatter, premul),
        "reduce_scatter_single": (_reduce_scatter, premul),  # not in every torch
        "reduce_scatter": (_reduce_scatter, premul),
        "barrier": (_barrier, "gloo's takes no device_ids"),
    }
    for name, (around, why) in replaced.items():
        if hasattr(dist, name):
            wrapped = wrapping(getattr(dist, name), around)
            for owner in (distributed_c10d, dist):
                patch(owner, name, wrapped, why)
    for owner in (distributed_c10d, dist):
        patch(owner, "_make_nccl_premul_sum", PremulSum, premul)
    why = "device_type='cuda'"
    wrapped = wrapping(device_mesh.init_device_mesh, _on_cpu_mesh)
    for owner in (device_mesh, dist):
        patch(owner, "init_device_mesh", wrapped, why)
    wrap(DeviceMesh, "__init__", _on_cpu_mesh, why)
    patch(DeviceMesh, "from_group", staticmethod(wrapping(DeviceMesh.from_group, _on_cpu_mesh)), why)
    why = "one thread a group: two free tensors at once; one device"
    wrap(dist.ProcessGroupGloo, "__init__", _gloo_init, why)
    for name in ("_get_backend", "_start_coalescing", "_end_coalescing"):
        wrap(dist.ProcessGroup, name, _with_cpu_device, "device='cuda'")
    why = "gloo's threads do not free tensors beside the main thread; results are handed out at wait()"
    for name in WRITING:
        wrap(dist.ProcessGroup, name, _launch, why)
    wrap(dist.ProcessGroup, "barrier", _launch_barrier, why)
    wrap(dist.ProcessGroup, "send", _launch_send, "gloo drops a send that nobody waits for")
    wrap(functional, "_maybe_wrap_tensor", _wait_and_wrap, why)
    wrap(Work, "wait", _wait, "gloo copies results when it is waited for: no work of the capture")
