"""CUDA's random number generators on top of the CPU's.

torch's C++ code draws from its default CPU generator when no generator is given. Here that generator holds the state
of the current *device* generator, and ``torch.get_rng_state`` and the like use a second generator, the host's. So
operations on device tensors draw from the device's sequence without a wrapper.

A state is an object with an identity, as CUDA's graph-safe states are: ``graphsafe_set_state`` makes the default
generator draw from, and advance, the given object.
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
    """One sequence of random numbers; ``value`` is current only while the state is not the active one."""

    active: GeneratorState

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def load(self) -> None:
        """Make torch's C++ code draw from this state."""
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
        """Draw from this state in a block, then from the one that was active before."""
        before = GeneratorState.active
        self.load()
        try:
            yield
        finally:
            before.load()


GeneratorState.active = GeneratorState(ENGINE.get_state())


def _refuse_in_capture(what: str) -> None:
    # CUDA: a generator's host-side seed and offset mean nothing to a graph that is being captured
    if streams.is_current_stream_capturing():
        raise RuntimeError(f"Cannot call CUDAGeneratorImpl::{what} during CUDA graph capture.")


class CudaGenerator(torch._C.Generator):
    """A generator of the device: the default one, or one of its own sequence.

    States are uint8 tensors of the CPU generator's size (5056 bytes), not CUDA's 16.
    """

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
            RuntimeError: a capture is under way.
            TypeError: ``new_state`` is not a generator state of this backend.
        """
        _refuse_in_capture("set_state")
        self.state.set(new_state)
        return self

    def manual_seed(self, seed: int) -> CudaGenerator:
        _refuse_in_capture("set_current_seed")
        self.state.set(torch._C.Generator("cpu").manual_seed(int(seed)).get_state())
        return self

    def seed(self) -> int:
        _refuse_in_capture("seed")
        fresh = torch._C.Generator("cpu")
        seed = fresh.seed()
        self.state.set(fresh.get_state())
        return seed

    def initial_seed(self) -> int:
        _refuse_in_capture("current_seed")
        probe = torch._C.Generator("cpu")
        probe.set_state(self.state.get())
        return probe.initial_seed()

    def clone_state(self) -> CudaGenerator:
        """A generator with its own state, a copy of this one's."""
        return CudaGenerator(state=GeneratorState(self.state.get()))

    def graphsafe_get_state(self) -> CudaGenerator:
        """A generator that shares this one's state object."""
        return CudaGenerator(state=self.state)

    def graphsafe_set_state(self, new_state: CudaGenerator) -> CudaGenerator:
        """Draw from ``new_state``'s state object from now on."""
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
    """``torch.Generator``: ``device="cuda"`` makes a generator of the device."""

    def __new__(cls, device: Any = "cpu"):
        if torch.device(device).type == "cuda":
            return CudaGenerator()
        return torch._C.Generator(device)


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return DEFAULT.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    DEFAULT.set_state(new_state)


def uninstall() -> None:
    """Let the C++ code draw from the host's sequence again."""
    DEFAULT.state.set(HOST.get_state())


def install() -> None:
    """Give torch.cuda its generators and ``torch``'s own functions the host's."""
    HOST.set_state(ENGINE.get_state())
    why = "CUDA and the CPU have a generator each; the C++ default one draws for the device"
    for owner in (torch, torch.random):
        patch(owner, "default_generator", HOST, why)
    patch(torch, "Generator", Generator, "torch.Generator(device='cuda')")
    patch(torch.cuda, "default_generators", (DEFAULT,), why)
    for name, value in {
        "get_rng_state": _get_rng_state,
        "get_rng_state_all": lambda: [DEFAULT.get_state()],
        "set_rng_state": _set_rng_state,
        "set_rng_state_all": lambda new_states: _set_rng_state(new_states[0]),
        "manual_seed": lambda seed: DEFAULT.manual_seed(seed) and None,
        "manual_seed_all": lambda seed: DEFAULT.manual_seed(seed) and None,
        "seed": lambda: DEFAULT.seed() and None,
        "seed_all": lambda: DEFAULT.seed() and None,
        "initial_seed": lambda: DEFAULT.initial_seed(),
    }.items():
        for owner in (torch.cuda, torch.cuda.random):
            patch(owner, name, value, why)
    from torch.utils import checkpoint

    patch(checkpoint, "get_device_states", lambda *args: ([0], [DEFAULT.get_state()]), "device tensors look like CPU's")
    patch(checkpoint, "set_device_states", lambda ids, states, **_: _set_rng_state(states[0]), "see get_device_states")
