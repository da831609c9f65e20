"""Calls that name a CUDA device, answered with CPU tensors.

Every factory and every method that moves a tensor is replaced on ``torch`` and ``torch.Tensor``, so that this holds in
all threads, in hooks and in tensor subclasses. A factory that names no device, or "cpu" as a string, makes a
host tensor; ``torch.device("cpu")`` may be the ``.device`` of a device tensor and means the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import capture_state, generators, streams
from .errors import NOT_PERMITTED, CaptureError, cuda_error
from .host_memory import host_factory, is_host, is_pinned, mark_host
from .patches import patch

_WHY = "device='cuda' and calls without a device"
_TWO = "host and device draw from two sequences"

# make a tensor from sizes and numbers
_FACTORIES = (
    "empty empty_strided empty_permuted zeros ones full eye arange range linspace logspace scalar_tensor tril_indices "
    "triu_indices hann_window hamming_window blackman_window bartlett_window kaiser_window"
)
_RANDOM_FACTORIES = ["rand", "randn", "randint", "randperm", "normal"]
# copy Python data
_COPIES = ["tensor", "as_tensor", "asarray"]
# make a tensor on the device of their first argument
_LIKE = ["empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"]
_NEW = ["new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor"]
_RANDOM_METHODS = "normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_"
_RANDOM_FUNCTIONS = ["bernoulli", "multinomial", "poisson"]
_TYPES = ["Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool"]


def is_cuda_device(device: Any) -> bool:
    """Whether ``device``, as torch's functions take it, is a CUDA device."""
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def to_cpu(device: Any) -> Any:
    """Return the CPU for a CUDA device, and anything else as it is."""
    return torch.device("cpu") if is_cuda_device(device) else device


def _refuse_copy_to_host(tensor: torch.Tensor, what: str) -> None:
    state = capture_state.current()
    if state is not None and streams.is_current_stream_capturing() and not is_host(tensor):
        raise state.invalidate(cuda_error(NOT_PERMITTED, f"{what} copies device data to the host"))


def _drawing(call: Callable, args: tuple, kwargs: dict, on_host: bool) -> Any:
    """Call a random function with the generator that a GPU build would use."""
    generator = kwargs.get("generator")
    if isinstance(generator, generators.CudaGenerator):
        with generator.state.loaded():
            return call(*args, **{**kwargs, "generator": None})
    if generator is None and on_host:
        kwargs = {**kwargs, "generator": generators.HOST}
    return call(*args, **kwargs)


def _factory(call: Callable, is_random: bool) -> Callable:
    @functools.wraps(call)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        on_device = is_cuda_device(device) or isinstance(device, torch.device)
        if on_device:
            kwargs["device"] = to_cpu(device)
        pinned = kwargs.pop("pin_memory", False)
        on_host = pinned or not (on_device or kwargs.get("out") is not None)
        with host_factory(on_host):
            made = _drawing(call, args, kwargs, on_host) if is_random else call(*args, **kwargs)
        return mark_host(made, pinned) if on_host else made

    return make


def _normal(call: Callable) -> Callable:
    made = _factory(call, is_random=True)

    @functools.wraps(call)
    def normal(*args: Any, **kwargs: Any) -> torch.Tensor:
        if any(isinstance(a, torch.Tensor) for a in args):
            return _drawing(call, args, kwargs, False)
        return made(*args, **kwargs)

    return normal


def _copy(call: Callable) -> Callable:
    @functools.wraps(call)
    def copy(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if is_cuda_device(device):
            state = capture_state.current()
            if state is not None and streams.is_current_stream_capturing() and not isinstance(data, torch.Tensor):
                raise state.invalidate(
                    CaptureError(
                        "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is "
                        f"pinned. torch.{call.__name__}(data, device='cuda') copies host data: make it before."
                    )
                )
            kwargs["device"] = to_cpu(device)
            made = call(data, *args, **kwargs)
            return _moved(made, data) if isinstance(data, torch.Tensor) else made
        with host_factory():
            made = call(data, *args, **kwargs)
        return made if isinstance(data, torch.Tensor) or isinstance(device, torch.device) else mark_host(made)

    return copy


def _like(call: Callable) -> Callable:
    @functools.wraps(call)
    def like(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
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

    return like


def _random_method(call: Callable) -> Callable:
    @functools.wraps(call)
    def draw(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _drawing(call, (tensor, *args), kwargs, is_host(tensor))

    return draw


def _moved(made: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``made``, got from ``source`` by a move to the device. If ``source`` lies on the host, that is a copy."""
    return made.clone() if made is source and is_host(source) else made


def _cuda(call: Callable) -> Callable:
    @functools.wraps(call)
    def cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None):
        return _moved(tensor, tensor)

    return cuda


def _to(call: Callable) -> Callable:
    @functools.wraps(call)
    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
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

    return to


def _cpu(call: Callable) -> Callable:
    @functools.wraps(call)
    def cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if is_host(tensor):
            return tensor
        _refuse_copy_to_host(tensor, "Tensor.cpu")
        made = call(tensor, *args, **kwargs)
        return mark_host(made.clone() if made is tensor else made)

    return cpu


def _reading(call: Callable) -> Callable:
    @functools.wraps(call)
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _refuse_copy_to_host(tensor, f"Tensor.{call.__name__}")
        return call(tensor, *args, **kwargs)

    return read


def _type(call: Callable) -> Callable:
    @functools.wraps(call)
    def tensor_type(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            name = call(tensor)
            return name if is_host(tensor) else name.replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return call(tensor, dtype, non_blocking, **kwargs)

    return tensor_type


def _one_hot(call: Callable) -> Callable:
    @functools.wraps(call)
    def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        if num_classes <= 0 or is_host(tensor):
            return call(tensor, num_classes)
        # CUDA's does not look at the values; the CPU's reads their range on the host
        return tensor.new_zeros(*tensor.shape, num_classes).scatter_(-1, tensor.unsqueeze(-1), 1)

    return one_hot


def _is_cuda(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not is_host(tensor)


def _context_init(call: Callable) -> Callable:
    @functools.wraps(call)
    def init(self: Any, device: Any) -> None:
        call(self, to_cpu(torch.device(device)))

    return init


def _load(call: Callable) -> Callable:
    @functools.wraps(call)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return call(f, to_cpu(map_location), *args, **kwargs)

    return load


def install() -> None:
    """Replace the factories and the moving methods."""
    from torch.utils import _device

    # torch keeps the set of factories that `with torch.device(...)` applies to: it must hold the originals
    _device._device_constructors()
    patch(_device.DeviceContext, "__init__", _context_init(_device.DeviceContext.__init__), "with torch.device('cuda')")
    for name in _FACTORIES.split():
        patch(torch, name, _factory(getattr(torch, name), is_random=False), _WHY)
    for name in _RANDOM_FACTORIES:
        original = getattr(torch, name)
        patch(torch, name, _normal(original) if name == "normal" else _factory(original, is_random=True), _WHY)
    for name in _COPIES:
        patch(torch, name, _copy(getattr(torch, name)), _WHY)
    for name in _LIKE:
        patch(torch, name, _like(getattr(torch, name)), _WHY)
    for name in _NEW:
        patch(torch.Tensor, name, _like(getattr(torch.Tensor, name)), _WHY)
    for name in _RANDOM_METHODS.split():
        patch(torch.Tensor, name, _random_method(getattr(torch.Tensor, name)), _TWO)
    for name in _RANDOM_FUNCTIONS:
        patch(torch, name, _random_method(getattr(torch, name)), _TWO)
    for name, wrap in {"to": _to, "cuda": _cuda, "cpu": _cpu, "type": _type}.items():
        patch(torch.Tensor, name, wrap(getattr(torch.Tensor, name)), "moves a tensor")
    for name in ("tolist", "numpy"):
        patch(torch.Tensor, name, _reading(getattr(torch.Tensor, name)), "reads device data on the host")
    functional = torch.nn.functional
    patch(functional, "one_hot", _one_hot(functional.one_hot), "CUDA's one_hot does not wait for the device")
    patch(torch.Tensor, "is_cuda", property(_is_cuda), "device tensors are CPU tensors")
    patch(torch.Tensor, "pin_memory", lambda tensor, *_: mark_host(tensor.clone(), pinned=True), "nothing to pin")
    patch(torch.Tensor, "is_pinned", lambda tensor, *_: is_pinned(tensor), "nothing to pin")
    patch(torch.Tensor, "record_stream", lambda tensor, stream: None, "memory is freed in program order")
    patch(torch, "load", _load(torch.load), "map_location='cuda'")
    from_numpy, get_rng_state = torch.from_numpy, torch.random.get_rng_state
    patch(torch, "from_numpy", lambda array: mark_host(from_numpy(array)), "host memory")
    for owner in (torch, torch.random):
        patch(owner, "get_rng_state", lambda: mark_host(get_rng_state()), "host memory")
    for name in _TYPES:
        patch(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"), "device tensors are CPU tensors")
