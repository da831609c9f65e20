"""Local graphs: layers recorded in the first step and replayed from the second compute what they compute eagerly."""

import pytest

from megatron.core.transformer.cuda_graphs import (
    delete_cuda_graphs,
)

from .local_graph_cases import stack, train

pytestmark = pytest.mark.usefixtures("cpu_backend")


@pytest.fixture(autouse=True)
def no_graphs():
    """No local graphs of another test, and none that outlives this one."""
    delete_cuda_graphs()
    yield
    delete_cuda_graphs()


def eager_calls(model):
    return [layer.eager_calls for layer in model.layers]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_training_is_bit_for_bit_eager(dropout, microbatches):
    eager = train(stack(graphs=False, dropout=dropout), microbatches=microbatches)
    model = stack(dropout=dropout)
    assert train(model, microbatches=microbatches) == eager
    assert eager_calls(model) == [microbatches + 3] * 3  # the recorded step, warm-up of two, and capture
