"""FunctionGuard: replays are refused once parameters are not what they were at capture."""

import pytest
import torch

from megatron.core.transformer._cuda_graphs.attribute_reads import AttributeReads
from megatron.core.transformer._cuda_graphs.engine.addresses import MovedBufferError
from megatron.core.transformer._cuda_graphs.local.guards import FunctionGuard
from megatron.core.transformer._cuda_graphs.replay_conditions import autocast_in_force
from megatron.core.transformer.cuda_graphs import create_cudagraphs, delete_cuda_graphs

from .local_graph_cases import batch, record, stack


@pytest.fixture
def module():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].bias.requires_grad_(False)
    return module


def guard_of(module):
    return FunctionGuard("layer 1", module, AttributeReads(), autocast_in_force())


@pytest.fixture
def guard(module):
    module[0].weight.main_grad = torch.zeros(2, 2)
    return guard_of(module)


def test_parameters_as_at_capture_pass(guard):
    guard.check_parameters(grad_enabled=True)


def test_a_parameter_that_moved_is_named(guard, module):
    module[1].weight.data = torch.zeros(2, 2)
    with pytest.raises(MovedBufferError, match=r"use 1\.weight of layer 1"):
        guard.check_parameters(grad_enabled=False)


@pytest.mark.parametrize("there", [True, False])
def test_a_main_gradient_that_moved_or_went_is_named(guard, module, there):
    module[0].weight.main_grad = torch.zeros(2, 2) if there else None
    with pytest.raises(MovedBufferError, match=r"the main gradient of 0\.weight of layer 1"):
        guard.check_parameters(grad_enabled=False)


def test_a_buffer_that_moved_is_named(module):
    module[1].register_buffer("count", torch.zeros(2))
    guard = guard_of(module)
    module[1].count = module[1].count.clone()
    with pytest.raises(MovedBufferError, match=r"the buffer 1\.count of layer 1"):
        guard.check_parameters(grad_enabled=False)


def test_a_buffer_that_is_made_later_is_none_of_the_graphs(module):
    module[1].register_buffer("cache", None)
    guard = guard_of(module)
    module[1].cache = torch.zeros(2)
    guard.check_parameters(grad_enabled=False)


def test_another_parameter_on_the_same_memory_is_named(guard, module):
    module[1].weight = torch.nn.Parameter(module[1].weight.data)
    with pytest.raises(RuntimeError, match=r"parameter 1\.weight was replaced"):
        guard.check_parameters(grad_enabled=False)


@pytest.mark.parametrize(("index", "change"), [(0, "was frozen"), (1, "was unfrozen")])
def test_a_parameter_that_was_frozen_or_unfrozen_is_named_where_gradients_are_computed(guard, module, index, change):
    module[index].bias.requires_grad_(bool(index))
    guard.check_parameters(grad_enabled=False)
    with pytest.raises(RuntimeError, match=rf"parameter {index}\.bias {change} .*delete_cuda_graphs\(\)"):
        guard.check_parameters(grad_enabled=True)


@pytest.mark.parametrize("at_capture", [True, False])
def test_a_hook_of_a_parameter_with_a_main_gradient_is_named_where_gradients_are_computed(module, at_capture):
    module[0].weight.main_grad = torch.zeros(2, 2)
    guard = None if at_capture else guard_of(module)
    hooks = [linear.weight.register_hook(lambda grad: None) for linear in module]
    guard = guard or guard_of(module)
    guard.check_parameters(grad_enabled=False)
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight has a hook"):
        guard.check_parameters(grad_enabled=True)
    hooks[0].remove()
    guard.check_parameters(grad_enabled=True)  # without a main gradient a hook is given what autograd adds up


@pytest.mark.usefixtures("cpu_backend", "no_graphs")
class TestReplays:
    @pytest.mark.parametrize("change", ["freeze", "replace", "move", "move main_grad"])
    def test_are_refused_until_the_change_is_recorded(self, change):
        model = stack(count=2)
        linear = model.layers[1].linear
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param)
        record(model)
        model(batch(1)).sum().backward()
        create_cudagraphs()
        if change == "freeze":
            linear.bias.requires_grad_(False)
        elif change == "replace":
            linear.bias = torch.nn.Parameter(linear.bias.detach().clone())
        elif change == "move":
            linear.bias.data = linear.bias.data.clone()
        else:
            linear.bias.main_grad = torch.zeros_like(linear.bias)
        named = r"use (the main gradient of )?linear\.bias of layer 2 |layer 2 .*parameter linear\.bias "
        with pytest.raises(RuntimeError, match=named):
            model(batch(2))
        delete_cuda_graphs()
        record(model)
        model(batch(2)).sum().backward()

    def test_are_checked_for_frozen_parameters_though_a_pass_without_gradients_came_first(self):
        model = stack(count=1)
        record(model)
        model.layers[0].linear.bias.requires_grad_(False)
        with torch.no_grad():
            model(batch(1))
        with pytest.raises(RuntimeError, match=r"linear\.bias was frozen"):
            model(batch(1))

    def test_are_checked_in_each_pass(self):
        model = stack(count=1)
        record(model)
        model(batch(1)).sum().backward()
        model.layers[0].linear.bias.requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"linear\.bias was frozen"):
            model(batch(1))
