"""Test that steps on local shards are bit-identical to steps on DTensors."""

import copy
import weakref
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from megatron.core.optimizer.local_shards import LocalShards

KINDS = (torch.optim.AdamW, torch.optim.Adam)
SHAPES = ((4, 3), (5,), (0, 3), (2, 2))


@pytest.fixture
def build(mesh):
    """Return a factory of identical optimizers of four DTensors; one DTensor is empty on this rank."""

    def shard(shape, generator):
        return DTensor.from_local(torch.randn(shape, generator=generator), mesh, [Shard(0)])

    def build(kind=torch.optim.AdamW, **options):
        generator = torch.Generator().manual_seed(1)
        params = [torch.nn.Parameter(shard(shape, generator)) for shape in SHAPES]
        return kind([{"params": params[:3]}, {"params": params[3:], "lr": 0.5}], lr=0.1, weight_decay=0.1, **options)

    return build


def give_gradients(optimizer, step):
    generator = torch.Generator().manual_seed(step)
    for param in parameters(optimizer):
        grad = torch.randn(param.to_local().shape, generator=generator)
        param.grad = DTensor.from_local(grad, param.device_mesh, param.placements) if grad.numel() else None


def parameters(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def values(optimizer):
    """Return copies of all local tensors that the optimizer owns."""
    owned = [*parameters(optimizer), *(value for state in optimizer.state.values() for value in state.values())]
    return [(value.to_local() if isinstance(value, DTensor) else value).detach().clone() for value in owned]


def step(optimizer, number, shards=None):
    give_gradients(optimizer, number)
    if shards is None:
        optimizer.step()
        return
    with shards.in_place():
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_bit_identical(build, kind):
    expected, optimizer = build(kind), build(kind)
    for number in range(4):
        step(expected, number)
    step(optimizer, 0)
    shards = LocalShards(optimizer)
    for number in range(1, 4):
        assert shards.current()
        step(optimizer, number, shards)
    assert all(torch.equal(*pair) for pair in zip(values(optimizer), values(expected), strict=True))


def test_steps_see_local_tensors_only_within_the_context(build):
    optimizer = build()
    step(optimizer, 0)
    params, state, groups = parameters(optimizer), optimizer.state, [dict(group) for group in optimizer.param_groups]
    give_gradients(optimizer, 1)
    shards = LocalShards(optimizer)
    with shards.in_place():
        inside = parameters(optimizer)
        assert not any(isinstance(param, DTensor) for param in inside)
        assert [param.grad is None for param in inside] == [param.grad is None for param in params]
        assert not any(isinstance(value, DTensor) for state in optimizer.state.values() for value in state.values())
        assert [group["foreach"] for group in optimizer.param_groups] == [False, False]
    assert all(this is that for this, that in zip(parameters(optimizer), params, strict=True))
    assert optimizer.state is state
    assert [group["foreach"] for group in optimizer.param_groups] == [group["foreach"] for group in groups]
    assert not any(param.grad is not None for param in inside)


def load(optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def add_group(optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


def replace_parameter(optimizer):
    optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(parameters(optimizer)[0].detach().clone())


def replace_state(optimizer):
    optimizer.state[parameters(optimizer)[0]]["exp_avg"] = torch.zeros(4, 3)


def replace_local_tensor(optimizer):
    state = optimizer.state[parameters(optimizer)[0]]["exp_avg"]
    state._local_tensor = state._local_tensor.clone()


def give_an_empty_parameter_a_gradient(optimizer):
    param = parameters(optimizer)[2]
    param.grad = DTensor.from_local(torch.zeros(0, 3), param.device_mesh, param.placements)


def remove_parameter(optimizer):
    optimizer.param_groups[0]["params"].pop()


def hook_steps(optimizer):
    optimizer.register_step_post_hook(lambda *unused: None)


CHANGES = (
    load,
    remove_parameter,
    hook_steps,
    add_group,
    replace_parameter,
    replace_state,
    replace_local_tensor,
    give_an_empty_parameter_a_gradient,
)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps", [0, 1])
def test_changes_of_the_optimizer_are_detected(build, change, steps):
    optimizer = build()
    step(optimizer, 0)
    shards = LocalShards(optimizer)
    for number in range(steps):
        step(optimizer, number, shards)
    assert shards.current()
    change(optimizer)
    assert not shards.current()


def test_only_elementwise_optimizers_of_dtensors_are_eligible(build):
    optimizer = build()
    step(optimizer, 0)
    assert LocalShards.eligible(optimizer, KINDS)
    assert not LocalShards.eligible(optimizer, [torch.optim.SGD])
    assert not LocalShards.eligible(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]), KINDS)
    for name, value in {"master_weights": True, "_scales": {1: 1.0}}.items():
        with mock.patch.object(optimizer, name, value, create=True):
            assert not LocalShards.eligible(optimizer, KINDS)
    optimizer.state[parameters(optimizer)[0]]["step"] = 1
    assert not LocalShards.eligible(optimizer, KINDS)


def offload(optimizer):
    """Replace all optimizer states with copies."""
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.clone()


@pytest.mark.parametrize("release", [load, offload])
def test_released_states_are_freed_at_once(build, release):
    optimizer = build()
    step(optimizer, 0)
    shards = LocalShards(optimizer)
    step(optimizer, 1, shards)
    values = [value for state in optimizer.state.values() for value in state.values()]
    values += [value._local_tensor for value in values if isinstance(value, DTensor)]
    owned = list(map(weakref.ref, values))
    del values
    release(optimizer)
    assert [tensor() for tensor in owned] == [None] * len(owned)
    assert not shards.current()
