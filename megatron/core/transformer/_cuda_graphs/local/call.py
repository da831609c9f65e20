"""The call that graphs are captured of: repeated on static tensors, and compared with later calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from ..engine.quantization import Quantization
from ..engine.rng import current_rng_state, use_rng_state
from ..replay_conditions import autocast_in_force
from .arguments import ArgMetadata, _check_supported_type, described, metas_of, tensors_of, with_tensors


class RecordedCall:
    """A call of a function of a module, and the modes and generator state around it.

    Args:
        base_module: The module, or another object, whose parameters ``func`` uses.
        func: The function; None for the module's own call.

    Attributes:
        module: ``base_module``; the modules among its attributes if it is no module itself.
        function: What is called, for comparison with other calls.
        args, kwargs: The arguments, with descriptions in the place of tensors.
        returned: What the function returned last in warm-up or capture, described likewise.
        quantization: That of the recorded pass, set by its runner; None without, and for calls that are not recorded.
        autocast: What ``autocast_in_force`` returned at construction.

    Raises:
        ArgumentTypeError: an argument is of a type that no graph takes.
    """

    def __init__(self, base_module: Any, func: Callable | None, args: Sequence[Any], kwargs: Mapping[str, Any]):
        for value in (*args, *kwargs.values()):
            _check_supported_type(ArgMetadata(value))
        number, own = getattr(base_module, "layer_number", None), getattr(func, "__name__", None)
        layer, suffix = "" if number is None else f"layer {number} ", "" if own is None else f".{own}"
        self.name = f"{layer}({type(base_module).__name__}){suffix}"
        self.module = _module_of(base_module)
        self.function = (base_module, func)
        self.func: Callable = func or partial(torch.nn.Module.__call__, base_module)
        self.args, self.kwargs = described(list(args)), described(dict(kwargs))
        self.metas = metas_of(self.args, self.kwargs)
        self.returned: Any = None
        self.quantization: Quantization | None = None
        self.autocast = autocast_in_force()
        self._rng_state = current_rng_state()
        kind = self.metas[0].device.type if self.metas else "cuda"
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._as_autocast = partial(torch.autocast, kind, dtype=dtype, enabled=enabled, cache_enabled=False)

    def __str__(self) -> str:
        shapes = ", ".join(str(tuple(meta.shape)) for meta in self.metas)
        return f"{self.name} on {shapes or 'no tensors'}"

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Restore the generator state and autocast that were in force around the call."""
        with use_rng_state(self._rng_state), self._as_autocast():
            yield

    def quantized(self) -> AbstractContextManager:
        """The context of FP8 or FP4 of the recorded pass; none without quantization."""
        return nullcontext() if self.quantization is None else self.quantization.autocast(0)

    def repeat(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the function with ``inputs`` in the place of the call's tensors; return the tensors that it returns."""
        args, kwargs = with_tensors((self.args, self.kwargs), iter(inputs))
        output = self.func(*args, **kwargs)
        self.returned = described(output)
        return tensors_of(output)


def _module_of(base: Any) -> torch.nn.Module:
    """The module that functions of ``base`` use: ``base`` itself, or the modules among its attributes."""
    if isinstance(base, torch.nn.Module):
        return base
    return torch.nn.ModuleList(value for value in vars(base).values() if isinstance(value, torch.nn.Module))
