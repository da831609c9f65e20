"""torch.distributed with gloo behind what is written for NCCL."""

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
from .patches import patch, wrap, wrapping


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


def _mesh_type(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type


def _init_device_mesh(call: Callable, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
    return call(_mesh_type(device_type), *args, **kwargs)


def _mesh_init(call: Callable, self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
    call(self, _mesh_type(device_type), *args, **kwargs)


def _mesh_from_group(call: Callable, group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
    return call(group, _mesh_type(device_type), *args, **kwargs)


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
    wrapped = wrapping(device_mesh.init_device_mesh, _init_device_mesh)
    for owner in (device_mesh, dist):
        patch(owner, "init_device_mesh", wrapped, why)
    wrap(DeviceMesh, "__init__", _mesh_init, why)
    patch(DeviceMesh, "from_group", staticmethod(wrapping(DeviceMesh.from_group, _mesh_from_group)), why)
    why = "one thread a group: two free tensors at once; one device"
    wrap(dist.ProcessGroupGloo, "__init__", _gloo_init, why)
    for name in ("_get_backend", "_start_coalescing", "_end_coalescing"):
        wrap(dist.ProcessGroup, name, _with_cpu_device, "device='cuda'")
