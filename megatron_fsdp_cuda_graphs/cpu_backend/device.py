"""Emulate one CUDA device with CPU tensors.

Replaces all functions of ``torch`` and ``torch.Tensor`` that create or move tensors, so that the emulation covers all
threads, hooks and tensor subclasses.

Functions that create tensors from sizes or Python data return host tensors if called without a device or with the
string ``"cpu"``. The object ``torch.device("cpu")`` instead means the emulated device, because it is the ``.device`` of
every device tensor.
"""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from . import generators, memory, streams
from .memory import host_factory, is_host, is_pinned, mark_host
from .patches import patch, wrap
from .streams import NOT_PERMITTED, CaptureError, cuda_error

PROPERTIES = SimpleNamespace(
    name="CPU behind torch.cuda",
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

# Functions that create tensors from sizes and numbers.
_FACTORIES = (
    "empty empty_strided empty_permuted zeros ones full eye arange range linspace logspace scalar_tensor tril_indices "
    "triu_indices hann_window hamming_window blackman_window bartlett_window kaiser_window"
)
_RANDOM_FACTORIES = "rand randn randint randperm normal"
# Functions that copy Python data.
_COPIES = "tensor as_tensor asarray"
# Functions that create tensors on the device of the first argument.
_LIKE = "empty_like zeros_like ones_like full_like rand_like randn_like randint_like"
_NEW = "new_empty new_empty_strided new_zeros new_ones new_full new_tensor"
_RANDOM_METHODS = "normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_"
_RANDOM_FUNCTIONS = "bernoulli multinomial poisson"
_TYPES = "Float Double Half BFloat16 Byte Char Short Int Long Bool"


def is_cuda_device(device: Any) -> bool:
    """Return whether ``device``, in any form that torch accepts, is a CUDA device."""
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def to_cpu(device: Any) -> Any:
    """Return the CPU for a CUDA device, and anything else unchanged."""
    return torch.device("cpu") if is_cuda_device(device) else device


def _refuse_copy_to_host(tensor: torch.Tensor, what: str) -> None:
    state = streams.current_capture()
    if state is not None and streams.is_current_stream_capturing() and not is_host(tensor):
        raise state.invalidate(cuda_error(NOT_PERMITTED, f"{what} copies device data to the host"))


def _drawing(call: Callable, args: tuple, kwargs: dict, on_host: bool) -> Any:
    """Call a random function. Its default generator is the host's if ``on_host``, otherwise the device's."""
    generator = kwargs.get("generator")
    if isinstance(generator, generators.CudaGenerator):
        with generator.state.loaded():
            return call(*args, **{**kwargs, "generator": None})
    if generator is None and on_host:
        kwargs = {**kwargs, "generator": generators.HOST}
    return call(*args, **kwargs)


def _factory(call: Callable, *args: Any, is_random: bool = False, **kwargs: Any) -> torch.Tensor:
    device = kwargs.get("device")
    on_device = is_cuda_device(device) or isinstance(device, torch.device)
    if on_device:
        kwargs["device"] = to_cpu(device)
    pinned = kwargs.pop("pin_memory", False)
    on_host = pinned or not (on_device or kwargs.get("out") is not None)
    with host_factory(on_host):
        made = _drawing(call, args, kwargs, on_host) if is_random else call(*args, **kwargs)
    return mark_host(made, pinned) if on_host else made


def _random_factory(call: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    if any(isinstance(a, torch.Tensor) for a in args):  # normal(mean, std)
        return _drawing(call, args, kwargs, False)
    return _factory(call, *args, is_random=True, **kwargs)


def _copy(call: Callable, data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    kwargs.pop("pin_memory", None)
    device = kwargs.get("device")
    if is_cuda_device(device):
        state = streams.current_capture()
        if state is not None and streams.is_current_stream_capturing() and not isinstance(data, torch.Tensor):
            raise state.invalidate(
                CaptureError(
                    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is "
                    f"pinned. torch.{call.__name__}(data, device='cuda') copies host data: create the tensor before "
                    "the capture."
                )
            )
        kwargs["device"] = to_cpu(device)
        made = call(data, *args, **kwargs)
        return _moved(made, data) if isinstance(data, torch.Tensor) else made
    with host_factory():
        made = call(data, *args, **kwargs)
    return made if isinstance(data, torch.Tensor) or isinstance(device, torch.device) else mark_host(made)


def _like(call: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    pinned = kwargs.pop("pin_memory", False)
    if kwargs.get("device") is not None:
        on_host = kwargs["device"] == "cpu"
        kwargs["device"] = to_cpu(kwargs["device"])
    else:
        on_host = is_host(tensor)
    on_host = on_host or pinned
    with host_factory(on_host):
        made = call(tensor, *args, **kwargs)
    return mark_host(made, pinned) if on_host else made


def _random(call: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _drawing(call, (tensor, *args), kwargs, is_host(tensor))


def _moved(made: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return ``made``, the result of moving ``source`` to the device, or a copy if both are the same host tensor."""
    return made.clone() if made is source and is_host(source) else made


def _cuda(
    call: Callable, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None
) -> torch.Tensor:
    return _moved(tensor, tensor)


def _to(call: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args and not isinstance(args[0], (torch.Tensor, torch.dtype)):
        kwargs.update(zip(("device", "dtype", "non_blocking", "copy"), args, strict=False))
        args = ()
    device = kwargs.get("device")
    if device is None:
        return call(tensor, *args, **kwargs)
    kwargs["device"] = to_cpu(device)
    if device != "cpu" or is_host(tensor):
        return _moved(call(tensor, *args, **kwargs), tensor)
    _refuse_copy_to_host(tensor, "Tensor.to('cpu')")
    made = call(tensor, *args, **kwargs)
    return mark_host(made.clone() if made is tensor else made)


def _cpu(call: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if is_host(tensor):
        return tensor
    _refuse_copy_to_host(tensor, "Tensor.cpu")
    made = call(tensor, *args, **kwargs)
    return mark_host(made.clone() if made is tensor else made)


def _reading(call: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    _refuse_copy_to_host(tensor, f"Tensor.{call.__name__}")
    return call(tensor, *args, **kwargs)


def _type(call: Callable, tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    if dtype is None:
        name = call(tensor)
        return name if is_host(tensor) else name.replace("torch.", "torch.cuda.", 1)
    return call(tensor, dtype, non_blocking, **kwargs)


def _is_cuda(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not is_host(tensor)


def _context_init(call: Callable, self: Any, device: Any) -> None:
    call(self, to_cpu(torch.device(device)))


def _load(call: Callable, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    return call(f, to_cpu(map_location), *args, **kwargs)


class Device:
    """Replaces ``torch.cuda.device``; does nothing because there is only one device."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        return None


def _install_device() -> None:
    """Replace the functions in torch.cuda that query the device and its memory."""
    cuda = torch.cuda
    for name, value in {
        "_initialized": True,  # _lazy_init returns, _lazy_call calls at once
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_is_in_bad_fork": lambda: False,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "device": Device,
        "get_device_properties": lambda device=None: PROPERTIES,
        "check_error": lambda result: None,
        **dict.fromkeys(("utilization", "temperature", "power_draw", "clock_rate"), lambda device=None: 0),
        "current_blas_handle": lambda: 0,
        "cudart": lambda: SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0),
    }.items():
        patch(cuda, name, value)
    for name, value in {
        "device_memory_used": lambda device=None: 0,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": memory.statistics,
        "memory_snapshot": memory.segments,
        "mem_get_info": lambda device=None: (PROPERTIES.total_memory, PROPERTIES.total_memory),
    }.items():
        for owner in (cuda, cuda.memory):
            patch(owner, name, value)
    for name in ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"):
        patch(torch._C, name, lambda *_: None)
    for name in ("range_push", "range_pop", "mark"):
        patch(cuda.nvtx, name, lambda *_: 0)
    patch(cuda.nvtx, "range", lambda msg, *args, **kwargs: contextlib.nullcontext())


def install() -> None:
    """Emulate one CUDA device, and replace the functions that create and move tensors."""
    _install_device()
    from torch.utils import _device

    # torch caches the factories that `with torch.device(...)` affects: fill the cache with the originals.
    _device._device_constructors()
    wrap(_device.DeviceContext, "__init__", _context_init)
    for owner, names, around in (
        (torch, _FACTORIES, _factory),
        (torch, _RANDOM_FACTORIES, _random_factory),
        (torch, _COPIES, _copy),
        (torch, _LIKE, _like),
        (torch.Tensor, _NEW, _like),
        (torch.Tensor, _RANDOM_METHODS, _random),
        (torch, _RANDOM_FUNCTIONS, _random),
        (torch.Tensor, "to", _to),
        (torch.Tensor, "cuda", _cuda),
        (torch.Tensor, "cpu", _cpu),
        (torch.Tensor, "type", _type),
        (torch.Tensor, "tolist numpy", _reading),
        (torch, "load", _load),
    ):
        for name in names.split():
            wrap(owner, name, around)
    patch(torch.Tensor, "is_cuda", property(_is_cuda))
    patch(torch.Tensor, "pin_memory", lambda tensor, *_: mark_host(tensor.clone(), pinned=True))
    patch(torch.Tensor, "is_pinned", lambda tensor, *_: is_pinned(tensor))
    patch(torch.Tensor, "record_stream", lambda tensor, stream: None)
    from_numpy, get_rng_state = torch.from_numpy, torch.random.get_rng_state
    patch(torch, "from_numpy", lambda array: mark_host(from_numpy(array)))
    for owner in (torch, torch.random):
        patch(owner, "get_rng_state", lambda: mark_host(get_rng_state()))
    for name in _TYPES.split():
        patch(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
