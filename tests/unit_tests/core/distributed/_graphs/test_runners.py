"""Which parameters an eager pass gathers, for which kernels, and what it releases."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.runners import Eager


class Parent(torch.nn.Module):
    """A module with a parameter of its own and a child."""

    def __init__(self):
        super().__init__()
        self.own = torch.nn.Parameter(torch.ones(1))
        self.child = torch.nn.Linear(1, 1)


def eager(module, *, fine_grained=False, recurses=(), fused=frozenset(), shards_outside=False, graphs=True):
    fsdp = Mock(
        enable_fine_grained_param_gather_hook=fine_grained,
        enable_fine_grained_param_gather_backward_hook=fine_grained,
        fine_grained_recurse_module_types=recurses,
        data_parallel_sharding_strategy="optim_grads_params",
    )
    fsdp.param_and_grad_buffer.unsharded_gradients.fused = fused
    fsdp.dist_index.hsdp_outer_dp_shard = shards_outside
    fsdp.fsdp_unit_modules = [Parent]
    fsdp.param_and_grad_buffer.param_to_param_group = dict.fromkeys(module.parameters(), 7)
    context: Any = SimpleNamespace(fsdp=fsdp, units={}, registry=SimpleNamespace(graphed={}, has_graphs=graphs))
    return Eager(context, module), fsdp


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("fine_grained", "recurses", "with_child"),
    [(True, (), False), (True, (Parent,), True), (False, (), False), (False, (Parent,), False)],
)
def test_parameters_of_children_are_gathered_with_fine_grained_hooks_for_some_types(
    direction, fine_grained, recurses, with_child
):
    module = Parent()
    runner, fsdp = eager(module, fine_grained=fine_grained, recurses=recurses)
    runner.gather(direction)
    (call,) = fsdp.all_gather_and_wait_parameters_ready.call_args_list
    assert call.args[0] == [*(module.parameters() if with_child else [module.own])]
    assert call.kwargs["bwd"] == (direction == "backward")


@pytest.mark.parametrize("fused", [False, True])
def test_fused_kernels_add_to_gradients_that_a_rank_has_whole(fused):
    module = Parent()
    runner, fsdp = eager(module, fused=frozenset([module.own] if fused else []))
    runner.gather("forward")
    let = fsdp.param_and_grad_buffer.unsharded_gradients.let_kernels_add
    assert [call.args for call in let.call_args_list] == ([([module.own],)] if fused else [])


def test_a_schedule_may_release_a_unit_that_is_inside_of_another():
    runner, fsdp = eager(Parent())
    for _ in range(2):
        runner.release("forward", lazy=True)
    release = fsdp.all_gather_pipeline.release_bucket
    assert [(call.args, call.kwargs) for call in release.call_args_list] == 2 * [((7, False), {"lazy": True})]


def test_what_is_no_unit_is_not_released():
    runner, _ = eager(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="Linear is not an FSDP unit"):
        runner.release("forward")


@pytest.mark.parametrize(("shards_outside", "graphs"), [(True, True), (True, False), (False, True)])
def test_instances_that_shard_among_them_gather_everything_first_beside_graphs(shards_outside, graphs):
    runner, fsdp = eager(Parent(), shards_outside=shards_outside, graphs=graphs)
    runner.gather("forward")
    gathered = [name for name, *_ in fsdp.mock_calls if "gather_" in name]
    first = ["all_gather_pipeline.gather_between_instances"] * (shards_outside and graphs)
    assert gathered == [*first, "all_gather_and_wait_parameters_ready"]
