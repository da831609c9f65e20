"""Test random numbers on the host, on the device and in graphs."""

import pickle

import pytest
import torch

from megatron_fsdp_cuda_graphs.cpu_backend import CaptureError

from .conftest import capture

DEVICE = {"device": "cuda"}


@pytest.fixture
def default():
    """Yield the default generator of the device; restore its state object after the test."""
    generator = torch.cuda.default_generators[0]
    state = generator.graphsafe_get_state()
    yield generator
    generator.graphsafe_set_state(state)


def dropped(x):
    return torch.nn.functional.dropout(x, 0.5)


def test_generators_have_separate_sequences():
    before = torch.cuda.get_rng_state()
    generator = torch.Generator("cuda")
    a = torch.randn(3, generator=generator.manual_seed(3), **DEVICE)
    b = torch.empty(3, **DEVICE).normal_(generator=generator.manual_seed(3))
    assert torch.equal(a, b)
    assert not torch.equal(a, torch.randn(3, generator=generator, **DEVICE))
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert isinstance(generator, torch.Generator)
    assert generator.device.type == "cuda"


def test_pickled_generator_keeps_its_value(default):
    copy = pickle.loads(pickle.dumps(default))
    assert torch.equal(copy.get_state(), default.get_state())


RANDOM = {
    "dropout": dropped,
    "randn": lambda x: torch.randn(*x.shape, **DEVICE),
    "normal_": lambda x: x.clone().normal_(),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "randperm": lambda x: torch.randperm(16, **DEVICE),
}


@pytest.mark.parametrize("draw", RANDOM.values(), ids=RANDOM.keys())
def test_replays_continue_the_sequence_like_eager_code(draw):
    x = torch.ones(4, 8, **DEVICE)
    torch.cuda.manual_seed(3)
    eager = [draw(x) for _ in range(3)]
    torch.cuda.manual_seed(3)
    graph, out = capture(lambda: draw(x))
    for expected in eager[:2]:
        graph.replay()
        assert torch.equal(out, expected)
    assert torch.equal(draw(x), eager[2])


def test_drawing_from_an_unregistered_state_raises(default):
    other, home = default.clone_state().manual_seed(2), default.graphsafe_get_state()

    def body():
        default.graphsafe_set_state(other)
        try:
            return dropped(torch.ones(8, **DEVICE))
        finally:
            default.graphsafe_set_state(home)

    with pytest.raises(CaptureError, match="generator not in capture mode"):
        capture(body)
    torch.cuda.set_stream(torch.cuda.Stream())
    graph, _ = capture(body, other)
    before = home.get_state()
    graph.replay()
    assert torch.equal(home.get_state(), before)


def test_replay_draws_from_the_captured_state(default):
    x = torch.ones(32, **DEVICE)
    captured_with = default.graphsafe_get_state()
    graph, out = capture(lambda: dropped(x))
    current = default.clone_state().manual_seed(9)
    default.graphsafe_set_state(current)
    current_value = current.get_state()
    captured_with.manual_seed(4)
    graph.replay()
    assert torch.equal(current.get_state(), current_value)
    default.graphsafe_set_state(captured_with)
    captured_with.manual_seed(4)
    assert torch.equal(out, dropped(x))


DRAWS = {
    "rand": lambda where: torch.rand(4, **where),
    "normal_": lambda where: torch.empty(4, **where).normal_(),
    "randperm": lambda where: torch.randperm(9, **where),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_host_and_device_have_separate_sequences(draw):
    torch.manual_seed(5)
    for where, own, other in (
        (DEVICE, torch.cuda.get_rng_state, torch.get_rng_state),
        ({}, torch.get_rng_state, torch.cuda.get_rng_state),
    ):
        before, others = own(), other()
        drawn = draw(where)
        assert torch.equal(other(), others)
        assert not torch.equal(own(), before)
        (torch.cuda.set_rng_state if where else torch.set_rng_state)(before)
        assert torch.equal(draw(where), drawn)


@pytest.mark.parametrize("call", ["get_state", "initial_seed"])
def test_reading_a_state_in_a_capture_raises(call, default):
    with pytest.raises(RuntimeError, match="during CUDA graph capture"):
        capture(lambda: getattr(default, call)())


def test_registering_a_host_generator_raises():
    with pytest.raises(TypeError, match="CUDA generator"):
        torch.cuda.CUDAGraph().register_generator_state(torch.Generator("cpu"))
