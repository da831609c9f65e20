"""Emulate CUDA's random number generators with CPU generators.

torch's C++ code draws from its default CPU generator. Here that generator holds the state of the current *device*
generator, so that operations on device tensors need no wrapper. A second generator serves ``torch.get_rng_state`` and
other functions of the host.

As in CUDA, a graph-safe state is an object: after ``graphsafe_set_state`` the default generator draws from and advances
that object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from . import streams
from .patches import patch

ENGINE: torch.Generator = torch._C.default_generator
HOST = torch._C.Generator("cpu")


class GeneratorState:
    """State of a random number sequence. ``value`` is outdated while the state is active."""

    active: GeneratorState

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def load(self) -> None:
        """Activate this state, so that torch's C++ code draws from it."""
        active = GeneratorState.active
        if active is not self:
            active.value = ENGINE.get_state()
            ENGINE.set_state(self.value)
            GeneratorState.active = self

    def get(self) -> torch.Tensor:
        return ENGINE.get_state() if GeneratorState.active is self else self.value.clone()

    def set(self, value: torch.Tensor) -> None:
        if GeneratorState.active is self:
            ENGINE.set_state(value)
        else:
            self.value = value.clone()

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """Activate this state within a ``with`` block."""
        before = GeneratorState.active
        self.load()
        try:
            yield
        finally:
            before.load()


GeneratorState.active = GeneratorState(ENGINE.get_state())


def _refuse_in_capture(what: str) -> None:
    # As in CUDA, the seed and offset are unknown on the host during a capture.
    if streams.is_current_stream_capturing():
        raise RuntimeError(f"Cannot call CUDAGeneratorImpl::{what} during CUDA graph capture.")


class CudaGenerator(torch._C.Generator):
    """A device generator. States are uint8 tensors of 5056 bytes, as for CPU generators, instead of CUDA's 16."""

    state: GeneratorState
    is_default: bool

    def __new__(cls, device: Any = "cuda", state: GeneratorState | None = None, is_default: bool = False):
        self = super().__new__(cls, "cpu")
        self.state = GeneratorState(torch._C.Generator("cpu").get_state()) if state is None else state
        self.is_default = is_default
        return self

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_state(self) -> torch.Tensor:
        _refuse_in_capture("get_state")
        return self.state.get()

    def set_state(self, new_state: torch.Tensor) -> CudaGenerator:
        """Overwrite the value of the current state.

        Raises:
            RuntimeError: A capture is in progress.
            TypeError: ``new_state`` is not a state of a CPU generator.
        """
        _refuse_in_capture("set_state")
        self.state.set(new_state)
        return self

    def manual_seed(self, seed: int) -> CudaGenerator:
        _refuse_in_capture("set_current_seed")
        self.state.set(torch._C.Generator("cpu").manual_seed(int(seed)).get_state())
        return self

    def initial_seed(self) -> int:
        _refuse_in_capture("current_seed")
        probe = torch._C.Generator("cpu")
        probe.set_state(self.state.get())
        return probe.initial_seed()

    def clone_state(self) -> CudaGenerator:
        """Return a generator with a copy of the state."""
        return CudaGenerator(state=GeneratorState(self.state.get()))

    def graphsafe_get_state(self) -> CudaGenerator:
        """Return a generator that shares the state object."""
        return CudaGenerator(state=self.state)

    def graphsafe_set_state(self, new_state: CudaGenerator) -> CudaGenerator:
        """Draw from the state object of ``new_state`` from now on."""
        self.state = new_state.state
        if self.is_default:
            self.state.load()
        return self

    def __reduce__(self):
        return _rebuild, (self.state.get(),)


def _rebuild(value: torch.Tensor) -> CudaGenerator:
    return CudaGenerator(state=GeneratorState(value))


DEFAULT = CudaGenerator(state=GeneratorState.active, is_default=True)


class _GeneratorFactory(type(torch._C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_GeneratorFactory):
    """Replaces ``torch.Generator``; ``device="cuda"`` creates a device generator."""

    def __new__(cls, device: Any = "cpu"):
        if torch.device(device).type == "cuda":
            return CudaGenerator()
        return torch._C.Generator(device)


def install() -> None:
    """Install separate default generators for the device and the host."""
    HOST.set_state(ENGINE.get_state())
    for owner in (torch, torch.random):
        patch(owner, "default_generator", HOST)
    patch(torch, "Generator", Generator)
    patch(torch.cuda, "default_generators", (DEFAULT,))
    patch(torch.cuda.random, "current_device", lambda: 0)
    patch(torch.cuda.random, "device_count", lambda: 1)
    from torch.utils import checkpoint

    # Activation checkpointing would mistake device tensors for CPU tensors.
    patch(checkpoint, "get_device_states", lambda *args: ([0], [DEFAULT.get_state()]))
    patch(checkpoint, "set_device_states", lambda ids, states, **_: DEFAULT.set_state(states[0]) and None)
