"""Test that reductions average gradients with ``--ddp-average-in-collective``."""

import pytest
import torch


@pytest.mark.parametrize(
    ("factor", "averages", "expected"),
    [
        (0.5, True, 2.0),  # half of the ranks have the expert
        (1.0, True, 4.0),
        (None, True, 4.0),  # with --calculate-per-token-loss
        (0.5, False, 2.0),
    ],
)
def test_expert_gradients_are_scaled_by_their_ranks(factor, averages, expected):
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import gradient_reduce_preprocessing

    grads = torch.full((2,), 4.0, dtype=torch.bfloat16)
    config = DistributedDataParallelConfig(average_in_collective=averages)
    operation = gradient_reduce_preprocessing(grads, factor, config)
    assert grads.tolist() == [expected, expected]
    average = averages and factor is not None
    assert operation == (torch.distributed.ReduceOp.AVG if average else torch.distributed.ReduceOp.SUM)
