"""torch.distributed with gloo behind what is written for NCCL."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from .device_names import to_cpu
from .patches import patch


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


def _init_process_group(call: Callable) -> Callable:
    @functools.wraps(call)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return call(_backend(backend) or "gloo", *args, **kwargs)

    return init_process_group


def _new_group(call: Callable) -> Callable:
    @functools.wraps(call)
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return call(ranks, timeout, _backend(backend), None, *args, **kwargs)

    return new_group


@functools.cache
def _gloo_device(interface: str, process: int) -> Any:
    """The device of gloo for ``interface``, or the default one, in this process.

    Groups share it: each has a thread, which wakes a hundred times a second even if nothing comes.
    """
    gloo = dist.ProcessGroupGloo
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()


def _gloo_init(call: Callable) -> Callable:
    @functools.wraps(call)
    def init(self: Any, store: Any, rank: int, size: int, timeout: Any = timedelta(minutes=30), **_: Any) -> None:
        options = timeout
        if isinstance(timeout, timedelta):
            interfaces = list(filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")))
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [_gloo_device(name, os.getpid()) for name in interfaces or [""]]
            options._threads = 1
        call(self, store, rank, size, options)

    return init


def _scale(op: Any, group: Any) -> float | torch.Tensor | None:
    """What to multiply contributions with, for the reductions gloo does not have."""
    if isinstance(op, PremulSum):
        return op.factor
    if op == dist.ReduceOp.AVG:
        return 1.0 / dist.get_world_size(group)
    return None


def _all_reduce(call: Callable) -> Callable:
    @functools.wraps(call)
    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        scale = _scale(op, group)
        if scale is not None:
            tensor.mul_(scale)
            op = dist.ReduceOp.SUM
        return call(tensor, op, group, async_op)

    return all_reduce


def _reduce_scatter(call: Callable) -> Callable:
    @functools.wraps(call)
    def reduce_scatter(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        scale = _scale(op, group)
        if scale is not None:
            input = [t * scale for t in input] if isinstance(input, list) else input * scale
            op = dist.ReduceOp.SUM
        return call(output, input, op, group, async_op)

    return reduce_scatter


def _barrier(call: Callable) -> Callable:
    @functools.wraps(call)
    def barrier(group=None, async_op=False, device_ids=None):
        return call(group, async_op)

    return barrier


def _mesh_init(call: Callable) -> Callable:
    @functools.wraps(call)
    def init(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        call(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return init


def _from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
    return _mesh_from_group(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _init_device_mesh(call: Callable) -> Callable:
    @functools.wraps(call)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return call("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return init_device_mesh


def _with_cpu_device(call: Callable) -> Callable:
    return lambda self, device, *args: call(self, to_cpu(device), *args)


_mesh_from_group = DeviceMesh.from_group


def install() -> None:
    """Map NCCL to gloo, its two extra reductions to arithmetic and a sum, and CUDA meshes to CPU meshes."""
    premul = "gloo has neither PREMUL_SUM nor AVG: contributions are scaled, then summed"
    for name, wrap, why in (
        ("init_process_group", _init_process_group, "nccl becomes gloo"),
        ("new_group", _new_group, "nccl becomes gloo"),
        ("all_reduce", _all_reduce, premul),
        ("reduce_scatter_tensor", _reduce_scatter, premul),
        *([("reduce_scatter_single", _reduce_scatter, premul)] if hasattr(dist, "reduce_scatter_single") else []),
        ("reduce_scatter", _reduce_scatter, premul),
        ("barrier", _barrier, "gloo's takes no device_ids"),
    ):
        wrapped = wrap(getattr(distributed_c10d, name))
        for owner in (distributed_c10d, dist):
            patch(owner, name, wrapped, why)
    for owner in (distributed_c10d, dist):
        patch(owner, "_make_nccl_premul_sum", PremulSum, premul)
    wrapped = _init_device_mesh(device_mesh.init_device_mesh)
    for owner in (device_mesh, dist):
        patch(owner, "init_device_mesh", wrapped, "device_type='cuda'")
    patch(DeviceMesh, "__init__", _mesh_init(DeviceMesh.__init__), "device_type='cuda'")
    patch(DeviceMesh, "from_group", staticmethod(_from_group), "device_type='cuda'")
    gloo = dist.ProcessGroupGloo
    patch(gloo, "__init__", _gloo_init(gloo.__init__), "one thread a group: two free tensors at once; one device")
    for name in ("_get_backend", "_start_coalescing", "_end_coalescing"):
        group = dist.ProcessGroup
        patch(group, name, _with_cpu_device(getattr(group, name)), "device='cuda'")
