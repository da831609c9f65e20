"""Layers that give the memory of a tensor back, and compute it again in their backward pass, train as eagerly."""

import pytest
import torch

from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

from .local_graph_cases import Layer, Stack, runners, train, use_graphable_rng

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class Recomputing(Layer):
    """Lets go of an activation in forward, and computes it again in backward."""

    def forward(self, hidden_states, *args, **kwargs):
        self.calls.count += 1
        checkpoint = CheckpointWithoutOutput(fp8=None)
        activation = checkpoint.checkpoint(torch.nn.functional.gelu, hidden_states)
        output = self.linear(activation)
        checkpoint.discard_output_and_register_recompute(output)
        return hidden_states + output, None


@pytest.fixture(autouse=True)
def _share_storage_without_a_compiler(monkeypatch):
    """megatron-core compiles a function that gives one storage the memory of another; a copy has the same values."""

    def share(output, recomputed):
        output.untyped_storage().resize_(recomputed.untyped_storage().nbytes())
        output.data.copy_(recomputed)

    monkeypatch.setattr(random, "_get_share_storage", lambda: share)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_training_is_bit_equal_to_eager(microbatches):
    def trained(graphs):
        torch.manual_seed(5)
        torch.cuda.manual_seed(5)
        use_graphable_rng()
        model = Stack([Recomputing(number, graphs) for number in (1, 2, 3)]).cuda()
        return train(model, microbatches=microbatches), model

    (eager, _), (graphed, model) = trained(graphs=False), trained(graphs=True)
    assert len(runners(model)) == 3
    assert graphed == eager
