"""Why dropout is refused in what is computed again: megatron-core's fault, without which the rows could go."""

import pytest
import torch

from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random


@pytest.mark.parametrize("for_graphs", [False, True])
def test_megatron_core_draws_other_numbers_again_from_generators_that_graphs_can_use(ranks, for_graphs):
    random.model_parallel_cuda_manual_seed(7, use_cudagraphable_rng=for_graphs, force_reset_rng=True)
    ones = torch.ones(64, device="cuda", requires_grad=True)
    dropped = tensor_parallel.checkpoint(lambda given: torch.nn.functional.dropout(given, 0.5), False, ones)
    dropped.sum().backward()
    assert torch.equal(dropped, ones.grad) is not for_graphs
