"""errors: where megatron-core asserts, its callers catch ours with ``except AssertionError`` too."""

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
    """A model of one layer with local graphs, and the layer's runner."""
    model = stack(count=1)
    record(model)
    return model, runners(model)[0]


@pytest.mark.parametrize(
    "refused",
    [
        lambda: ArgMetadata(3).zeros_like(),
        lambda: _check_supported_type(ArgMetadata(object())),
        lambda: layer_graph()(),
        lambda: layer_graph()(torch.ones(3, HIDDEN), packed_seq_params=object()),
    ],
    ids=["zeros of an int", "type", "too few inputs", "unknown keyword"],
)
def test_arguments(refused):
    with pytest.raises(AssertionError):
        refused()


def test_a_configuration_for_other_graphs():
    use_graphable_rng()
    with pytest.raises(AssertionError):
        CudaGraphManager(config(cuda_graph_impl="none"), pg_collection=groups())


def test_an_rng_tracker_that_graphs_cannot_use():
    random.initialize_rng_tracker(use_cudagraphable_rng=False, force_reset=True)
    with pytest.raises(AssertionError):
        CudaGraphManager(config(), pg_collection=groups())


def test_a_call_that_no_graph_is_for(recorded):
    model, _ = recorded
    with pytest.raises(AssertionError):
        model(batch(1, size=4))


def test_a_model_that_was_not_recorded(recorded):
    with pytest.raises(AssertionError):
        stack()(batch(0))


def test_more_micro_batches_than_graphs():
    model = stack(count=1, pipeline=2)
    record(model)
    model(batch(1))
    with pytest.raises(AssertionError):
        model(batch(1))


def test_a_runner_that_is_given_other_arguments(recorded):
    _, runner = recorded
    with pytest.raises(AssertionError):
        runner.replay_graph_capture(False, (torch.ones(4, HIDDEN),), {})


def test_a_runner_without_graphs(recorded):
    _, runner = recorded
    runner.fwd_graph = None
    with pytest.raises(AssertionError):
        runner.replay_graph_capture(False, (torch.ones(3, HIDDEN, requires_grad=True),), {})


def test_a_forward_pre_hook(recorded):
    model, _ = recorded
    model.layers[0].linear.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(AssertionError):
        model(batch(1))


def test_a_pass_that_was_recorded_after_capture(recorded):
    _, runner = recorded
    _CudagraphGlobalRecord.cudagraph_record.append((runner, "fwd"))
    try:
        with pytest.raises(AssertionError):
            _CudagraphGlobalRecord.create_cudagraphs()
    finally:
        _CudagraphGlobalRecord.cudagraph_record.clear()
