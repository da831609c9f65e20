"""States of random number generators that CUDA graphs can use."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from megatron.core.tensor_parallel import random as tensor_parallel_random

from ..errors import UnsupportedError
from ..replacements import between


def _clone_nested_tensors(value: Any) -> Any:
    """Return ``value`` with every tensor in it cloned; tuples, lists and dicts are rebuilt, anything else is shared.

    Raises:
        TypeError: ``value`` contains a set, which has no fixed order.
    """
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (set, frozenset)):
        raise TypeError("tensors in a set have no order that CUDA graphs could keep: use a tuple or a list")
    if isinstance(value, dict):
        return {key: _clone_nested_tensors(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_clone_nested_tensors, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(_clone_nested_tensors, value))
    return value


def _ensure_generator_state_is_cudagraph_safe(gen: torch.Generator) -> torch.Generator:
    """Let graphs use ``gen`` although its state was created or set under ``torch.inference_mode``, and return it.

    Tensors created in that mode are inference tensors, which cannot be written outside it. The state is set again from
    a clone that is a normal tensor. It stays the same object: graphs in which it is registered keep drawing from it.
    """
    with torch.inference_mode(False):
        gen.set_state(_clone_nested_tensors(gen.get_state()))
    return gen


def _default_generator() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]


def current_rng_state() -> torch.Generator:
    """Return a generator that shares the current state of the device's default generator.

    Megatron's and TransformerEngine's RNG trackers replace that state, for the decoder's layers under sequence
    parallelism, say.
    """
    return _default_generator().graphsafe_get_state()


def use_rng_state(state: torch.Generator) -> AbstractContextManager[None]:
    """Let the device's default generator draw from ``state``, a result of ``current_rng_state``."""
    draw_from = _default_generator().graphsafe_set_state
    return between(partial(draw_from, state), partial(draw_from, current_rng_state()))


_UNUSABLE = (
    "Megatron's RNG tracker keeps states that no CUDA graph can use. Give --te-rng-tracker, or without "
    "TransformerEngine initialize it with use_cudagraphable_rng=True."
)


def check_rng_tracker() -> None:
    """Check, before Megatron's RNG tracker has any state, that CUDA graphs can draw from its kind of states.

    Raises:
        UnsupportedError: it is not.
    """
    tracker = tensor_parallel_random.get_cuda_rng_tracker()
    usable = ("use_cudagraphable_rng", "is_inference_rng_tracker")
    of_te = type(tracker).__name__ == "TECudaRNGStatesTracker"
    if not of_te and not any(getattr(tracker, name, False) for name in usable):
        raise UnsupportedError(_UNUSABLE)


def generator_states() -> list[torch.Generator]:
    """Return the generators, besides the default one, from which a Megatron layer may draw.

    Raises:
        UnsupportedError: Megatron's RNG tracker keeps states that a graph cannot use.
    """
    states: list[torch.Generator] = []  # both trackers may have states of the same names
    if tensor_parallel_random._CUDA_RNG_STATE_TRACKER_INITIALIZED:
        states += (tensor_parallel_random.get_all_rng_states() or {}).values()
    distributed = sys.modules.get("transformer_engine.pytorch.distributed")
    if distributed is not None and distributed.graph_safe_rng_available():
        states += distributed.get_all_rng_states().values()
    if any(isinstance(state, torch.Tensor) for state in states):
        raise UnsupportedError(_UNUSABLE)
    return list(dict.fromkeys(states))


class GraphStates:
    """The states of Megatron's RNG tracker that graphs draw from: those that it has when this is made.

    A graph draws from the state objects of its capture. ``set_states`` of the tracker and a new seed put others in
    their place, from which eager passes draw.
    """

    def __init__(self) -> None:
        self._states = dict(_tracked())

    def adopt(self, *call: object) -> None:
        """Where the tracker has another state now, let graphs continue from its value, and the tracker from theirs.

        So does a fork of the tracker that is open. As a hook it gets a module's call, which it does not use.
        """
        tracked = _tracked()
        for name, ours in self._states.items():
            theirs = tracked.get(name, ours)
            if theirs is ours:
                continue
            state = theirs if isinstance(theirs, torch.Tensor) else theirs.get_state()
            is_open = _is_forked_to(name, state)
            if not torch.equal(state, ours.get_state()):  # a fork leaves another object for the same state
                ours.set_state(state)
            if is_open:
                _default_generator().graphsafe_set_state(ours)
            tracked[name] = ours


def _is_forked_to(name: str, state: torch.Tensor) -> bool:
    """Whether a fork of the RNG tracker is open, so that the default generator draws from the tracked ``state``.

    TransformerEngine's tracker does not record it, and torch does not show whether two generators share a state. Equal
    seeds and offsets mean that they do, except for the data-parallel state, which Megatron seeds like the default
    generator: a fork to that one is not found.
    """
    tracker = tensor_parallel_random._CUDA_RNG_STATE_TRACKER
    if hasattr(tracker, "_current_state_name"):
        return bool(tracker._current_state_name == name)
    if name == tensor_parallel_random.get_data_parallel_rng_tracker_name():
        return False
    return torch.equal(state, _default_generator().get_state())


def _tracked() -> dict[str, Any]:
    """The states of Megatron's RNG tracker, by name; empty without a tracker."""
    tracker = tensor_parallel_random._CUDA_RNG_STATE_TRACKER
    return getattr(tracker, "states_", {})


def device_generators() -> list[torch.Generator]:
    """Return the default generator and ``generator_states``."""
    return [_default_generator(), *generator_states()]


def make_generators_safe() -> None:
    """Let graphs use all generators, also those whose states were set under ``torch.inference_mode``."""
    for generator in device_generators():
        _ensure_generator_state_is_cudagraph_safe(generator)


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the state of every generator, those of the host too: draws of warm-up and capture have no effect.

    The default generator draws from the state that it drew from, also if an exception has ended a fork of Megatron's
    RNG tracker before it was undone (Ctrl-C can come there too).
    """
    tracker = tensor_parallel_random._CUDA_RNG_STATE_TRACKER
    forked_to = getattr(tracker, "_current_state_name", None)
    with ExitStack() as stack:
        for generator in device_generators():
            stack.callback(generator.set_state, generator.get_state())
        for read, restore in _host_generators().values():
            stack.callback(restore, read())
        if forked_to is not None:
            stack.callback(setattr, tracker, "_current_state_name", forked_to)
        stack.enter_context(use_rng_state(current_rng_state()))
        yield


@contextmanager
def refuse_host_draws() -> Iterator[None]:
    """Make sure that a pass draws no random numbers on the host.

    Such a number (whether to leave out a layer, say) would be the same in every replay.

    Raises:
        UnsupportedError: the state of a generator of the host is another at the end.
    """
    before = _host_states()
    yield
    now = _host_states()
    drawn = next((name for name, state in before.items() if not _are_equal(state, now[name])), "")
    if drawn:
        raise UnsupportedError(
            f"what is captured (or another thread meanwhile) draws random numbers from {drawn}, on the host, and each "
            "replay would repeat those of the capture: draw them on the device (torch.rand(..., device='cuda')) and "
            "let the device decide, or set --cuda-graph-modules to other parts of layers"
        )


def _host_generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Return by name how the state of each generator of the host is read, and how it is set."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
        "torch's generator of the CPU": (torch.get_rng_state, torch.set_rng_state),
        "Python's random": (random.getstate, random.setstate),
    }
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        found["numpy.random"] = numpy.get_state, numpy.set_state
    return found


def _host_states() -> dict[str, Any]:
    return {name: get() for name, (get, _) in _host_generators().items()}


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two states are equal: tensors, or tuples of numbers and arrays."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    pairs = zip(one, other, strict=True)
    return all((each == also).all() if hasattr(each, "all") else each == also for each, also in pairs)
