"""Every micro-batch of a step counts alike, also where a rank has gradients whole that others shard."""

from unittest import mock

import pytest
import torch

from tests.support.trainings.rounding import ROUNDING

from .fsdp_variants import STRATEGIES, Variant, run_backward, small

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_instances_send_gradients_in_the_dtype_that_was_asked_for(instances_of_one_rank, outer, microbatches):
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
def test_instances_send_gradients_that_are_scaled(instances_of_one_rank, outer):
    sharding = {"num_distributed_optimizer_instances": instances_of_one_rank, "outer_dp_sharding_strategy": outer}
    variant = Variant(small(), sharding=sharding)
    fsdp = variant.build().module
    fsdp.zero_grad_buffer()
    run_backward(fsdp, variant.case)  # not the last micro-batch: nothing is sent
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
def test_gradients_of_one_rank_instances_are_scaled_once(instances_of_one_rank, again, factor):
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
def test_gradients_of_experts_of_one_rank_are_scaled_once(four_ranks, again, factor):
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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_are_units_only_where_parameters_are_sharded(four_ranks, strategy):
    """A known limit of megatron-core, which docs/limits.md names."""
    four_ranks(1)
    units = Variant(small(data_parallel_sharding_strategy=strategy)).build().module.fsdp_unit_modules
    assert bool(units) == (strategy == "optim_grads_params")


# With overlap, reductions begin in the backward pass that is told to be the last.
@pytest.mark.parametrize(("overlap", "told_of_last"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_gradients_are_reduced_once_in_a_step(four_ranks, strategy, overlap, told_of_last):
    four_ranks(1)
    variant = Variant(small(data_parallel_sharding_strategy=strategy), sharding={"overlap_grad_reduce": overlap})
    fsdp = variant.build().module
    for _ in range(2):
        fsdp.is_last_microbatch = False
        fsdp.zero_grad_buffer()
        run_backward(fsdp, variant.case)
        unscaled = [group.main_grad_buffer.data.clone() for group in _groups(fsdp)]
        fsdp.is_last_microbatch = told_of_last
        run_backward(fsdp, variant.case)
        fsdp.finish_grad_sync()
        for group, before in zip(_groups(fsdp), unscaled, strict=True):
            assert before.any()
            assert torch.equal(group.main_grad_buffer.data, before * 2 / 4)


def _groups(fsdp):
    return fsdp.param_and_grad_buffer.parameter_groups


def test_gradients_of_an_instance_are_scaled_where_instances_shard_them_further(hybrid_ranks):
    sharding = {"num_distributed_optimizer_instances": hybrid_ranks, "outer_dp_sharding_strategy": "optim"}
    buffer = Variant(small(), sharding=sharding).build().module.param_and_grad_buffer
    assert {group.hfsdp_helper_gbuf.gradient_scaling_factor for group in buffer.parameter_groups} == {1 / 4}
