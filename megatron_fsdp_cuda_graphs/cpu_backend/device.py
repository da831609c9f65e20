"""One device with the properties that megatron asks for. They are made up, and no result depends on them."""

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

from . import pools
from .patches import patch

NAME = "CPU behind torch.cuda"
PROPERTIES = SimpleNamespace(
    name=NAME,
    major=9,
    minor=0,
    total_memory=1 << 34,
    multi_processor_count=1,
    max_threads_per_multi_processor=1,
    warp_size=32,
    is_integrated=False,
    is_multi_gpu_board=False,
    gcnArchName="",
    uuid=None,
)


class Device:
    """``torch.cuda.device``: selects nothing, there is one device."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        return None


def install() -> None:
    """Answer torch.cuda's questions about the device and its memory."""
    cuda = torch.cuda
    why = "one device, number 0, in every process"
    for name, value in {
        "_initialized": True,  # _lazy_init returns, _lazy_call calls at once
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "device": Device,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_properties": lambda device=None: PROPERTIES,
        "check_error": lambda result: None,
        "_sleep": lambda cycles: None,
        "utilization": lambda device=None: 0,
        "temperature": lambda device=None: 0,
        "power_draw": lambda device=None: 0,
        "clock_rate": lambda device=None: 0,
        "current_blas_handle": lambda: 0,
        "cudart": lambda: SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0),
    }.items():
        patch(cuda, name, value, why)
    for name, value in {
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "device_memory_used": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": pools.statistics,
        "memory_snapshot": pools.segments,
        "mem_get_info": lambda device=None: (PROPERTIES.total_memory, PROPERTIES.total_memory),
    }.items():
        for owner in (cuda, cuda.memory):
            patch(owner, name, value, "no allocator of the device's own")
    for name in ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"):
        patch(torch._C, name, lambda *_: None, "no allocator of the device's own")
    for name, value in {
        "range_push": lambda msg: 0,
        "range_pop": lambda: 0,
        "mark": lambda msg: None,
        "range": lambda msg, *args, **kwargs: contextlib.nullcontext(),
    }.items():
        patch(cuda.nvtx, name, value, "no profiler listens")
