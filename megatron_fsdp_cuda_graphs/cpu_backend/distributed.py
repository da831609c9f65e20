"""Run code written for NCCL on gloo.

gloo completes collectives in its own threads, which free tensors concurrently with the main thread and thereby corrupt
the heap in long runs. Here the launching thread waits for completion. A collective with ``async_op=True`` writes to
private memory, and its outputs hold NaN (integers and bools: zero) until ``wait()``, which exposes missing waits.
Sends and receives stay asynchronous, because pipeline stages launch them in different orders. Unlike NCCL, gloo drops a
send when its work object is deleted, so unfinished sends are kept.
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

# Methods of ProcessGroup in torch 2.11 to 2.15 that write to the tensors in their first argument.
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
    """A finished collective that copies its results to the outputs at ``wait``.

    In a capture, the current stream also waits for the stream that launched the collective, as it does with NCCL.
    """

    def __init__(self, outputs: Iterable[torch.Tensor] = (), results: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._held = list(zip(outputs, results, strict=True))
        self._launched = streams.current_stream().record_event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Copy the results to the outputs, and return True."""
        held, self._held = self._held, []
        if self._launched.capture is not None and self._launched.capture is streams.current_capture():
            streams.current_stream().wait_event(self._launched)
        for output, result in held:
            output.data.copy_(result)  # .data: collectives do not bump version counters
        return True

    # A program can read the outputs after each of these.
    synchronize = block_current_stream = is_completed = is_success = wait  # type: ignore[assignment]


def _launch(call: Callable, group: dist.ProcessGroup, written: Any, *args: Any, **kwargs: Any) -> HeldWork:
    if any(getattr(options, "asyncOp", None) is False for options in (*args, *kwargs.values())):
        call(group, written, *args, **kwargs).wait()
        return HeldWork()
    with torch.no_grad():
        results = tree_map_only(torch.Tensor, torch.clone, written)
        call(group, results, *args, **kwargs).wait()
        outputs = tensors_in(written)
        # In an in-place all-gather, the input is part of the output, and NCCL does not change it.
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
    # Messages arrive in order, so all sends before a finished one are finished.
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
    """Replaces NCCL's PREMUL_SUM, which multiplies inputs by ``factor`` before the sum."""

    factor: float | torch.Tensor


def _backend(name: str | None) -> str | None:
    """Return "gloo" for nccl or gloo (also for "cpu:gloo,cuda:nccl"), and "fake" for fake.

    Raises:
        ValueError: The backend is not gloo, nccl or fake.
    """
    if name is None:
        return None
    kinds = {part.split(":")[-1] for part in str(name).lower().split(",")}
    if kinds <= {"nccl", "gloo"}:
        return "gloo"
    if kinds == {"fake"}:
        return "fake"
    raise ValueError(f"backend={name!r} does not exist on the CPU backend: use gloo (or nccl, which is mapped to gloo)")


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
    """Return the gloo device of a network ``interface``, or of the default interface if it is empty.

    All groups in ``process`` share the device, because each device has a polling thread.
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
    """Return the input scale that lets a sum replace PREMUL_SUM or AVG, which gloo lacks; None for other reductions."""
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
    """Call a function of torch's device meshes with arguments "cuda" replaced by "cpu"."""
    cpu = ["cpu" if isinstance(arg, str) and arg == "cuda" else arg for arg in (*args, *kwargs.values())]
    return call(*cpu[: len(args)], **dict(zip(kwargs, cpu[len(args) :], strict=True)))


def _with_cpu_device(call: Callable, self: Any, device: Any, *args: Any) -> Any:
    return call(self, to_cpu(device), *args)


def install() -> None:
    """Map NCCL to gloo, PREMUL_SUM and AVG to scaled sums, and CUDA meshes to CPU meshes."""
    replaced: dict[str, Callable] = {
        "init_process_group": _init_process_group,
        "new_group": _new_group,
        "all_reduce": _all_reduce,
        "reduce_scatter_tensor": _reduce_scatter,
        "reduce_scatter_single": _reduce_scatter,  # only in some versions of torch
        "reduce_scatter": _reduce_scatter,
        "barrier": _barrier,
    }
    for name, around in replaced.items():
        if hasattr(dist, name):
            wrapped = wrapping(getattr(dist, name), around)
            for owner in (distributed_c10d, dist):
                patch(owner, name, wrapped)
    for owner in (distributed_c10d, dist):
        patch(owner, "_make_nccl_premul_sum", PremulSum)
    wrapped = wrapping(device_mesh.init_device_mesh, _on_cpu_mesh)
    for owner in (device_mesh, dist):
        patch(owner, "init_device_mesh", wrapped)
    wrap(DeviceMesh, "__init__", _on_cpu_mesh)
    patch(DeviceMesh, "from_group", staticmethod(wrapping(DeviceMesh.from_group, _on_cpu_mesh)))
    wrap(dist.ProcessGroupGloo, "__init__", _gloo_init)
    for name in ("_get_backend", "_start_coalescing", "_end_coalescing"):
        wrap(dist.ProcessGroup, name, _with_cpu_device)
    for name in WRITING:
        wrap(dist.ProcessGroup, name, _launch)
    wrap(dist.ProcessGroup, "barrier", _launch_barrier)
    wrap(dist.ProcessGroup, "send", _launch_send)
    wrap(functional, "_maybe_wrap_tensor", _wait_and_wrap)
    wrap(Work, "wait", _wait)
