"""Test that errors are AssertionErrors where megatron-core asserts, as its callers expect."""

import pytest
import torch

from megatron.core.tensor_parallel import random
from megatron.core.transformer.cuda_graphs import ArgMetadata, CudaGraphManager, _check_supported_type

from .layer_graphs import layer_graph
from .local.local_graph_cases import HIDDEN, batch, config, groups, record, runners, stack, use_graphable_rng

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


@pytest.fixture
def recorded():
    """Return a one-layer model with local graphs, and its runner."""
    model = stack(count=1)
    record(model)
    return model, runners(model)[0]


def with_another_rng_tracker():
    random.initialize_rng_tracker(use_cudagraphable_rng=False, force_reset=True)
    CudaGraphManager(config(), pg_collection=groups())


@pytest.mark.parametrize(
    "refused",
    [
        lambda: ArgMetadata(3).zeros_like(),
        lambda: _check_supported_type(ArgMetadata(object())),
        lambda: layer_graph().replay((), {}),
        lambda: layer_graph().replay((torch.ones(3, HIDDEN),), {"packed_seq_params": object()}),
        lambda: CudaGraphManager(config(cuda_graph_impl="none"), pg_collection=groups()),
        with_another_rng_tracker,
    ],
    ids=["zeros of an int", "type", "too few inputs", "unknown keyword", "implementation", "RNG tracker"],
)
def test_arguments_and_options_are_refused(refused):
    use_graphable_rng()
    with pytest.raises(AssertionError):
        refused()


def after_reset(model, runner):
    runner.reset()
    runner.replay_graph_capture(False, (torch.ones(3, HIDDEN, requires_grad=True),), {})


def with_a_hook(model, runner):
    model.layers[0].linear.register_forward_pre_hook(lambda module, args: None)
    model(batch(1))


@pytest.mark.parametrize(
    "refused",
    [
        lambda model, runner: model(batch(1, size=4)),
        lambda model, runner: stack()(batch(0)),
        lambda model, runner: [model(batch(1)) for _ in range(2)],
        lambda model, runner: runner.replay_graph_capture(False, (torch.ones(4, HIDDEN),), {}),
        after_reset,
        with_a_hook,
    ],
    ids=["shape", "another model", "micro-batches", "arguments", "reset", "hook"],
)
def test_calls_without_matching_graph_are_refused(recorded, refused):
    with pytest.raises(AssertionError):
        refused(*recorded)
