"""Random number generator states in CUDA graphs."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron.core.tensor_parallel import random as tensor_parallel_random

from ..errors import UnsupportedError


def _default_generator() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]


def current_rng_state() -> torch.Generator:
    """Return a generator that shares the current state of the device's default generator.

    RNG trackers switch that state, for example around decoder layers with sequence parallelism.
    """
    return _default_generator().graphsafe_get_state()


def generator_states() -> list[torch.Generator]:
    """Return the generators that a Megatron layer may draw from, except for the default one.

    Raises:
        UnsupportedError: Graphs cannot use the states of Megatron's RNG tracker.
    """
    states: list[torch.Generator] = []  # a list, because both trackers may use the same names
    if tensor_parallel_random._CUDA_RNG_STATE_TRACKER_INITIALIZED:
        states += (tensor_parallel_random.get_all_rng_states() or {}).values()
    distributed = sys.modules.get("transformer_engine.pytorch.distributed")
    if distributed is not None and distributed.graph_safe_rng_available():
        states += distributed.get_all_rng_states().values()
    if any(isinstance(state, torch.Tensor) for state in states):
        raise UnsupportedError(
            "Megatron's RNG tracker has states that CUDA graphs cannot use. Add --te-rng-tracker, or, without "
            "TransformerEngine, initialize the tracker with use_cudagraphable_rng=True."
        )
    return list(dict.fromkeys(states))


class GraphStates:
    """RNG tracker states that graphs draw from, recorded at construction.

    A graph draws from the state objects that existed at its capture. The tracker's ``set_states`` and a new seed
    replace these objects, and only eager passes draw from the new ones.
    """

    def __init__(self) -> None:
        self._states = dict(_tracked())

    def adopt(self, *call: object) -> None:
        """Restore the graphs' states in the tracker, with the values of the states that replaced them.

        An open fork of the tracker continues with the graphs' states. Arguments are ignored, so this works as a hook.
        """
        tracked = _tracked()
        for name, ours in self._states.items():
            theirs = tracked.get(name, ours)
            if theirs is ours:
                continue
            state = theirs if isinstance(theirs, torch.Tensor) else theirs.get_state()
            is_open = _is_forked_to(name, state)
            if not torch.equal(state, ours.get_state()):  # a fork leaves a new object with the same state
                ours.set_state(state)
            if is_open:
                _default_generator().graphsafe_set_state(ours)
            tracked[name] = ours


def _is_forked_to(name: str, state: torch.Tensor) -> bool:
    """Return whether a fork to the tracked state ``name`` is open, so that the default generator draws from it.

    TransformerEngine's tracker does not record forks, and torch does not expose whether two generators share a state.
    This function therefore compares seeds and offsets. It cannot detect forks to the data-parallel state, which
    Megatron seeds like the default generator.
    """
    tracker = tensor_parallel_random._CUDA_RNG_STATE_TRACKER
    if hasattr(tracker, "_current_state_name"):
        return bool(tracker._current_state_name == name)
    if name == tensor_parallel_random.get_data_parallel_rng_tracker_name():
        return False
    return torch.equal(state, _default_generator().get_state())


def _tracked() -> dict[str, Any]:
    """Return the states of Megatron's RNG tracker by name; empty without a tracker."""
    tracker = tensor_parallel_random._CUDA_RNG_STATE_TRACKER
    return getattr(tracker, "states_", {})


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Context manager that restores the states of all generators on device and host after warm-up and capture.

    The default generator returns to its original state even if an exception left a fork of the RNG tracker open.
    """
    tracker = tensor_parallel_random._CUDA_RNG_STATE_TRACKER
    forked_to = getattr(tracker, "_current_state_name", None)
    with ExitStack() as stack:
        for generator in [_default_generator(), *generator_states()]:
            stack.callback(generator.set_state, generator.get_state())
        for read, restore in _host_generators().values():
            stack.callback(restore, read())
        if forked_to is not None:
            stack.callback(setattr, tracker, "_current_state_name", forked_to)
        stack.callback(_default_generator().graphsafe_set_state, current_rng_state())
        yield


@contextmanager
def refuse_host_draws() -> Iterator[None]:
    """Context manager that rejects random numbers drawn on the host, because every replay would repeat them.

    Raises:
        UnsupportedError: The state of a host generator has changed by the end of the context.
    """
    before = _host_states()
    yield
    now = _host_states()
    drawn = next((name for name, state in before.items() if not _are_equal(state, now[name])), "")
    if drawn:
        raise UnsupportedError(
            f"the captured code, or another thread, draws random numbers on the host ({drawn}), which each replay "
            "would repeat: draw and use them on the device (torch.rand(..., device='cuda')), or set "
            "--cuda-graph-modules to other parts of layers"
        )


def _host_generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Return the functions that read and set the state of each host generator, by name."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
        "torch's CPU generator": (torch.get_rng_state, torch.set_rng_state),
        "Python's random": (random.getstate, random.setstate),
    }
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        found["numpy.random"] = numpy.get_state, numpy.set_state
    return found


def _host_states() -> dict[str, Any]:
    return {name: get() for name, (get, _) in _host_generators().items()}


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two states are equal: tensors, or tuples of numbers and arrays."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    pairs = zip(one, other, strict=True)
    return all((each == also).all() if hasattr(each, "all") else each == also for each, also in pairs)
