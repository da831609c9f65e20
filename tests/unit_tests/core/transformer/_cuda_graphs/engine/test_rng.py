"""Test graph-safe generators, and random numbers drawn during a capture."""

import random
import sys
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch

from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, initialize_rng_tracker
from megatron.core.transformer._cuda_graphs.engine.rng import (
    GraphStates,
    generator_states,
    preserve_rng,
    refuse_host_draws,
)
from megatron.core.transformer._cuda_graphs.errors import UnsupportedError


@pytest.mark.usefixtures("cpu_backend")
def test_generators_of_transformer_engine_are_found(monkeypatch):
    distributed: Any = ModuleType("transformer_engine.pytorch.distributed")
    generator = torch.Generator("cuda")
    distributed.graph_safe_rng_available = lambda: True
    distributed.get_all_rng_states = lambda: {"dropout": generator}
    monkeypatch.setitem(sys.modules, distributed.__name__, distributed)
    assert generator_states() == [generator]
    # Megatron's tracker may have a different state with the same name.
    initialize_rng_tracker(use_cudagraphable_rng=True, force_reset=True)
    get_cuda_rng_tracker().add("dropout", 3)
    states = generator_states()
    assert len(states) == 2
    assert generator in states


@pytest.mark.usefixtures("cpu_backend")
def test_interrupted_fork_is_undone():
    initialize_rng_tracker(use_cudagraphable_rng=True, force_reset=True)
    tracker = get_cuda_rng_tracker()
    tracker.add("model-parallel-rng", 5)
    before = torch.cuda.get_rng_state()

    def interrupted():
        with preserve_rng():
            tracker.fork().__enter__()
            torch.rand(3, device="cuda")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert tracker._current_state_name == "default-rng"
    assert torch.equal(torch.cuda.get_rng_state(), before)
    with tracker.fork():
        pass


DRAWS: dict[str, Any] = {
    "Python's random": random.random,
    "numpy.random": numpy.random.random,
    "torch's CPU generator": lambda: torch.rand((), generator=torch.default_generator).item(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_host_draws_are_refused_and_undone(cpu_backend, name):
    drawn = []
    refused = pytest.raises(UnsupportedError, match=f"draws random numbers on the host \\({name}\\)")
    with refused, preserve_rng(), refuse_host_draws():
        drawn.append(DRAWS[name]())
    assert DRAWS[name]() == drawn[0]


def new_seed(tracker):
    states = {}
    for name, state in tracker.get_states().items():
        states[name] = state.clone_state()
        states[name].manual_seed(9)
    tracker.set_states(states)


@pytest.fixture
def drawing(cpu_backend):
    """Return the RNG tracker, the ``GraphStates``, and the generator state that graphs use."""
    initialize_rng_tracker(use_cudagraphable_rng=True, force_reset=True)
    tracker = get_cuda_rng_tracker()
    tracker.add("model-parallel-rng", 5)
    return tracker, GraphStates(), tracker.get_states()["model-parallel-rng"]


@pytest.mark.parametrize("inside", [False, True], ids=["before a fork", "in a fork"])
def test_graphs_adopt_new_tracker_states(drawing, inside):
    """Check that graphs use new tracker states adopted before a fork or, as with sequence parallelism, inside it."""
    tracker, states, of_graphs = drawing
    new_seed(tracker)
    expected = torch.rand(4, generator=tracker.get_states()["model-parallel-rng"].clone_state(), device="cuda")
    if not inside:
        states.adopt()
    with tracker.fork():
        if inside:
            states.adopt()
        drawn = [torch.rand(2, generator=of_graphs, device="cuda"), torch.rand(2, device="cuda")]
    assert torch.equal(torch.cat(drawn), expected)
    states.adopt()
    after = tracker.get_states()["model-parallel-rng"]
    assert torch.equal(after.get_state(), of_graphs.get_state())


class TracksNoName:
    """A tracker that does not record which state is forked, like TransformerEngine's."""

    def __init__(self, state):
        self.states_ = {"model-parallel-rng": state}


@pytest.mark.parametrize("is_open", [False, True])
def test_open_fork_is_found_without_its_name(drawing, monkeypatch, is_open):
    _, _, of_graphs = drawing
    tracker = TracksNoName(of_graphs)
    monkeypatch.setattr(tensor_parallel_random, "_CUDA_RNG_STATE_TRACKER", tracker)
    states = GraphStates()
    tracker.states_["model-parallel-rng"] = theirs = of_graphs.clone_state()
    theirs.manual_seed(9)
    with preserve_rng():
        if is_open:
            torch.cuda.default_generators[0].graphsafe_set_state(theirs)
        before = of_graphs.get_state()
        states.adopt()
        assert torch.equal(of_graphs.get_state(), theirs.get_state())
        assert not torch.equal(of_graphs.get_state(), before)
        torch.rand(2, device="cuda")
        assert torch.equal(of_graphs.get_state(), theirs.get_state()) is not is_open


def test_data_parallel_state_is_not_taken_for_a_fork(drawing, monkeypatch):
    _, _, of_graphs = drawing
    tracker = TracksNoName(of_graphs)
    tracker.states_ = {"data-parallel-rng": of_graphs}
    monkeypatch.setattr(tensor_parallel_random, "_CUDA_RNG_STATE_TRACKER", tracker)
    states = GraphStates()
    torch.cuda.manual_seed(9)
    tracker.states_["data-parallel-rng"] = theirs = of_graphs.clone_state()
    theirs.manual_seed(9)
    states.adopt()
    assert torch.equal(of_graphs.get_state(), theirs.get_state())
    torch.rand(2, device="cuda")
    assert torch.equal(of_graphs.get_state(), theirs.get_state())
