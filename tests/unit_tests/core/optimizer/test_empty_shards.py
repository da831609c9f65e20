"""Test that optimizer states of empty shards have the names and step counts of other states."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from megatron.core.optimizer.empty_shards import state_of_every_parameter

EMPTY = 1


@pytest.fixture
def optimizer(mesh):
    """Return an Adam optimizer with two parameter groups; the second is empty on this rank."""
    full, empty = (
        torch.nn.Parameter(DTensor.from_local(torch.ones(shape), mesh, [Shard(0)])) for shape in ((2, 3), (0, 3))
    )
    return torch.optim.Adam([{"params": [full]}, {"params": [empty], "weight_decay": 0.1}])


def parameters(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def step(optimizer):
    full, _ = parameters(optimizer)
    full.grad = torch.ones_like(full)
    optimizer.step()


def completed(optimizer):
    """Return optimizer states by parameter index, including a state for the empty shard."""
    numbers = {id(param): number for number, param in enumerate(parameters(optimizer))}
    own = {numbers[id(param)]: state for param, state in optimizer.state.items()}
    return state_of_every_parameter(optimizer, own, lambda param: numbers[id(param)])


def test_empty_shard_has_the_states_of_other_shards(optimizer):
    step(optimizer)
    states = completed(optimizer)
    assert states[EMPTY].keys() == states[0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    for name in "exp_avg", "exp_avg_sq":
        assert isinstance(states[EMPTY][name], DTensor)
        assert states[EMPTY][name].to_local().shape == (0, 3)
    assert states[0] == optimizer.state[parameters(optimizer)[0]]


def test_loaded_step_count_advances(optimizer):
    step(optimizer)
    optimizer.state[parameters(optimizer)[EMPTY]] = loaded = completed(optimizer)[EMPTY]
    step(optimizer)
    states = completed(optimizer)
    assert (loaded["step"], states[EMPTY]["step"]) == (1, 2)


def test_states_are_in_the_order_of_parameters(mesh):
    shapes = {"a": (0, 3), "b": (2, 3), "c": (0, 3), "d": (1, 3)}
    tensors = {name: DTensor.from_local(torch.ones(shape), mesh, [Shard(0)]) for name, shape in shapes.items()}
    params = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    optimizer = torch.optim.Adam(params.values())
    for param in (params["d"], params["b"]):
        optimizer.state[param] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(param)}
    names = {id(param): name for name, param in params.items()}
    own = {names[id(param)]: state for param, state in optimizer.state.items()}
    assert [*own] == ["d", "b"]
    assert [*state_of_every_parameter(optimizer, own, lambda param: names[id(param)])] == ["a", "b", "c", "d"]


def test_states_come_from_a_rank_with_other_shards(mesh, monkeypatch):
    empty = torch.nn.Parameter(DTensor.from_local(torch.ones(0, 3), mesh, [Shard(0)]))
    heard = {"step": torch.tensor(3.0), "exp_avg": torch.float32, "exp_avg_sq": torch.bfloat16}

    def all_gather_object(models, own, group):
        assert own is None
        models[:] = [None, heard]

    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    states = state_of_every_parameter(torch.optim.Adam([empty]), {}, lambda param: EMPTY)[EMPTY]
    assert (states["step"], states["exp_avg"].dtype, states["exp_avg_sq"].dtype) == (3, torch.float32, torch.bfloat16)
    assert states["exp_avg"].to_local().shape == (0, 3)
