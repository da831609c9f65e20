"""Tests that errors where megatron-core asserts are also AssertionErrors, as its callers expect."""

import pytest
import torch

from megatron.core.tensor_parallel import random
from megatron.core.transformer.cuda_graphs import (
    ArgMetadata,
    CudaGraphManager,
    _check_supported_type,
    _CudagraphGlobalRecord,
)

from .layer_graphs import layer_graph
from .local.local_graph_cases import HIDDEN, batch, config, groups, record, runners, stack, use_graphable_rng

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


@pytest.fixture
def recorded():
    """Return a one-layer model with local graphs, and its runner."""
    model = stack(count=1)
    record(model)
    return model, runners(model)[0]


@pytest.mark.parametrize(
    "refused",
    [
        lambda: ArgMetadata(3).zeros_like(),
        lambda: _check_supported_type(ArgMetadata(object())),
        lambda: layer_graph().replay((), {}),
        lambda: layer_graph().replay((torch.ones(3, HIDDEN),), {"packed_seq_params": object()}),
    ],
    ids=["zeros of an int", "type", "too few inputs", "unknown keyword"],
)
def test_arguments_are_refused(refused):
    with pytest.raises(AssertionError):
        refused()


def test_other_graph_implementation_is_refused():
    use_graphable_rng()
    with pytest.raises(AssertionError):
        CudaGraphManager(config(cuda_graph_impl="none"), pg_collection=groups())


def test_unusable_rng_tracker_is_refused():
    random.initialize_rng_tracker(use_cudagraphable_rng=False, force_reset=True)
    with pytest.raises(AssertionError):
        CudaGraphManager(config(), pg_collection=groups())


def test_call_without_graph_is_refused(recorded):
    model, _ = recorded
    with pytest.raises(AssertionError):
        model(batch(1, size=4))


def test_unrecorded_model_is_refused(recorded):
    with pytest.raises(AssertionError):
        stack()(batch(0))


def test_too_many_microbatches_are_refused():
    model = stack(count=1, pipeline=2)
    record(model)
    model(batch(1))
    with pytest.raises(AssertionError):
        model(batch(1))


def test_other_arguments_are_refused(recorded):
    _, runner = recorded
    with pytest.raises(AssertionError):
        runner.replay_graph_capture(False, (torch.ones(4, HIDDEN),), {})


def test_runner_without_graphs_is_refused(recorded):
    _, runner = recorded
    runner.reset()
    with pytest.raises(AssertionError):
        runner.replay_graph_capture(False, (torch.ones(3, HIDDEN, requires_grad=True),), {})


def test_forward_pre_hook_is_refused(recorded):
    model, _ = recorded
    model.layers[0].linear.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(AssertionError):
        model(batch(1))


def test_pass_recorded_after_capture_is_refused(recorded):
    _, runner = recorded
    _CudagraphGlobalRecord.cudagraph_record.append((runner, "fwd"))
    try:
        with pytest.raises(AssertionError):
            _CudagraphGlobalRecord.create_cudagraphs()
    finally:
        _CudagraphGlobalRecord.cudagraph_record.clear()
