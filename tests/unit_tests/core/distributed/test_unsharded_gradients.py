"""Test that gradients, sharded or not, are scaled and reduced once, in the requested dtype."""

from unittest import mock

import pytest
import torch

from tests.support.trainings.rounding import ROUNDING

from .fsdp_variants import Variant, run_backward, small

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_replicas_reduce_in_the_requested_dtype(instances_of_one_rank, outer, microbatches):
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    def reduced(**other):
        model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        sharding = {"num_distributed_optimizer_instances": instances_of_one_rank, "outer_dp_sharding_strategy": outer}
        variant = Variant(small(), sharding=sharding | other)
        fsdp = variant.build().module
        fsdp.zero_grad_buffer()
        for microbatch in range(microbatches):
            fsdp.is_last_microbatch = microbatch == microbatches - 1
            run_backward(fsdp, variant.case)
        fsdp.finish_grad_sync()
        return [group.main_grad_buffer.data * instances_of_one_rank for group in _groups(fsdp)]

    for exact, sent in zip(reduced(), reduced(megatron_fsdp_grad_comm_dtype=torch.bfloat16), strict=True):
        assert torch.equal(sent, exact.bfloat16().float())
        assert not torch.equal(sent, exact)


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_replicas_reduce_scaled_gradients(instances_of_one_rank, outer):
    sharding = {"num_distributed_optimizer_instances": instances_of_one_rank, "outer_dp_sharding_strategy": outer}
    variant = Variant(small(), sharding=sharding)
    fsdp = variant.build().module
    fsdp.zero_grad_buffer()
    run_backward(fsdp, variant.case)  # not the last micro-batch: no communication
    main_grads = [(group.hfsdp_helper_gbuf or group.main_grad_buffer).data for group in _groups(fsdp)]
    expected = sorted(grads.abs().sum().item() * 2 / instances_of_one_rank for grads in main_grads)
    sent, send = [], torch.distributed.all_reduce if outer == "no_shard" else torch.distributed.reduce_scatter_tensor

    def note(*args, group, **kwargs):
        if group is fsdp.dist_index.get_outer_fsdp_group():
            tensor = kwargs["input"] if "input" in kwargs else args[0]
            sent.append(tensor.abs().sum().item())
        return send(*args, group=group, **kwargs)

    fsdp.is_last_microbatch = True
    with mock.patch.object(torch.distributed, send.__name__, note):
        run_backward(fsdp, variant.case)
        fsdp.finish_grad_sync()
    assert sorted(sent) == pytest.approx(expected, rel=ROUNDING)


AGAIN = pytest.mark.parametrize(
    ("again", "factor"),
    [(lambda fsdp: fsdp.finish_grad_sync(), 1), (lambda fsdp: fsdp.scale_gradients(0.5), 0.5)],
    ids=["finished again", "scaled further"],
)


@AGAIN
def test_gradients_of_one_rank_replicas_are_scaled_once(instances_of_one_rank, again, factor):
    variant = Variant(small(), sharding={"num_distributed_optimizer_instances": instances_of_one_rank})
    fsdp = variant.build().module
    fsdp.zero_grad_buffer()
    run_backward(fsdp, variant.case)
    main_grads = _groups(fsdp)[0].main_grad_buffer.data
    unscaled = main_grads.clone()
    assert unscaled.any()
    fsdp.is_last_microbatch = True
    run_backward(fsdp, variant.case)
    fsdp.finish_grad_sync()
    assert torch.equal(main_grads, unscaled * 2 / instances_of_one_rank)
    again(fsdp)
    assert torch.equal(main_grads, unscaled * 2 / instances_of_one_rank * factor)


@AGAIN
def test_gradients_of_one_rank_experts_are_scaled_once(four_ranks, again, factor):
    four_ranks(1, expert_model_parallel_size=4)
    variant = Variant(small(experts=4))
    fsdp = variant.build().module
    fsdp.zero_grad_buffer()
    run_backward(fsdp, variant.case)
    main_grads = next(group for group in _groups(fsdp) if group.is_expert_param).main_grad_buffer.data
    main_grads.fill_(8.0)
    fsdp.finish_grad_sync()
    assert set(main_grads.tolist()) == {8.0 / 4}
    again(fsdp)
    assert set(main_grads.tolist()) == {8.0 / 4 * factor}


# With overlap, reductions start in the backward pass that is marked as the last.
@pytest.mark.parametrize(("overlap", "marked_last"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_gradients_are_reduced_once_in_a_step(four_ranks, strategy, overlap, marked_last):
    four_ranks(1)
    variant = Variant(small(data_parallel_sharding_strategy=strategy), sharding={"overlap_grad_reduce": overlap})
    fsdp = variant.build().module
    for _ in range(2):
        fsdp.is_last_microbatch = False
        fsdp.zero_grad_buffer()
        run_backward(fsdp, variant.case)
        unscaled = [group.main_grad_buffer.data.clone() for group in _groups(fsdp)]
        fsdp.is_last_microbatch = marked_last
        run_backward(fsdp, variant.case)
        fsdp.finish_grad_sync()
        for group, before in zip(_groups(fsdp), unscaled, strict=True):
            assert before.any()
            assert torch.equal(group.main_grad_buffer.data, before * 2 / 4)


def _groups(fsdp):
    return fsdp.param_and_grad_buffer.parameter_groups
