"""``--ddp-average-in-collective``: reductions average gradients."""

import pytest
import torch

from .fsdp_variants import Variant, run_backward, small

AVERAGED = {"average_in_collective": True}


@pytest.mark.usefixtures("one_rank")
def test_a_dense_model_has_the_gradients_that_it_has_with_sums():
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    def reduced(sharding):
        model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        variant = Variant(small(), sharding=sharding)
        fsdp = variant.build().module
        assert fsdp.dist_index.get_dp_group(is_expert_parallel=True) is None  # as it was before
        run_backward(fsdp, variant.case)
        fsdp.finish_grad_sync()
        return [group.main_grad_buffer.data for group in fsdp.param_and_grad_buffer.parameter_groups]

    for averaged, summed in zip(reduced(AVERAGED), reduced({}), strict=True):
        assert torch.equal(averaged, summed)
        assert averaged.abs().sum() > 0


@pytest.mark.parametrize(
    ("factor", "averages", "expected"),
    [
        (0.5, True, 2.0),  # of experts that half of the ranks have
        (1.0, True, 4.0),
        (None, True, 4.0),  # with --calculate-per-token-loss
        (0.5, False, 2.0),
    ],
)
def test_gradients_of_experts_count_as_often_as_ranks_have_them(factor, averages, expected):
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import gradient_reduce_preprocessing

    grads = torch.full((2,), 4.0, dtype=torch.bfloat16)
    config = DistributedDataParallelConfig(average_in_collective=averages)
    operation = gradient_reduce_preprocessing(grads, factor, config)
    assert grads.tolist() == [expected, expected]
    average = averages and factor is not None
    assert operation == (torch.distributed.ReduceOp.AVG if average else torch.distributed.ReduceOp.SUM)
