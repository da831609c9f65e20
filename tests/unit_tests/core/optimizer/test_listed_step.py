"""Test that steps with cached tensor lists are bit-identical to the optimizer's own steps."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from megatron.core.optimizer.local_shards import LocalShards

SHAPES = ((4, 3), (5,), (0, 3), (2, 2), (6,), (0,))
GROUPS = ((0, 1, 2), (3, 4), (5,))  # the last is empty on this rank


class FusedAdam(torch.optim.Optimizer):
    """Stand-in for TransformerEngine's ``FusedAdam`` that passes up to ``per_launch`` tensors to each kernel launch.

    Attributes:
        inspected: Number of parameters that the last step looped over in Python.
        casts: Whether kernels get temporary copies of the momenta.
    """

    def __init__(self, params, per_launch=1024, casts=False):
        super().__init__(params, {"lr": 0.1, "step": 0})
        self.per_launch, self.casts = per_launch, casts
        self.multi_tensor_adam = self.launch

    @staticmethod
    def launch(chunk_size, flag, lists, lr, step):
        assert chunk_size == 64 and flag.item() == 0
        for grad, param, momentum in zip(*lists, strict=True):
            momentum.mul_(0.9).add_(grad)
            param.sub_(momentum * lr / step)

    @torch.no_grad()
    def step(self):
        self.inspected = 0
        for group in self.param_groups:
            if not group["params"]:  # as in versions before 2.19
                continue
            group["step"] += 1
            lists: tuple[list, list, list] = [], [], []
            for param in group["params"]:
                self.inspected += 1
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                if param.grad is None:
                    continue
                momentum = state["momentum"].clone() if self.casts else state["momentum"]
                for tensors, tensor in zip(lists, (param.grad, param, momentum), strict=True):
                    tensors.append(tensor._local_tensor if isinstance(tensor, DTensor) else tensor.data)
            for first in range(0, len(lists[0]), self.per_launch):
                part = [tensors[first : first + self.per_launch] for tensors in lists]
                self.multi_tensor_adam(64, torch.zeros(1), part, group["lr"], group["step"])


@pytest.fixture
def build(mesh):
    """Return a factory of identical optimizers whose parameters are DTensors in three groups."""

    def shard(shape, generator):
        return DTensor.from_local(torch.randn(shape, generator=generator), mesh, [Shard(0)])

    def build(**options):
        generator = torch.Generator().manual_seed(1)
        params = [torch.nn.Parameter(shard(shape, generator)) for shape in SHAPES]
        for param in params:
            if param.to_local().numel():
                param.grad = shard(param.shape, generator)
                param.grad.stays = True
        return FusedAdam([{"params": [params[number] for number in group]} for group in GROUPS], **options)

    return build


def parameters(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def values(optimizer):
    """Return the parameters, momenta and step counts."""
    tensors = [*parameters(optimizer), *(state["momentum"] for state in optimizer.state.values())]
    return [tensor.to_local().tolist() for tensor in tensors], [group["step"] for group in optimizer.param_groups]


@torch.no_grad()
def prepare(optimizer, number):
    """Set the gradients, in place, and one group's learning rate for step ``number``."""
    for param in filter(lambda param: param.grad is not None, parameters(optimizer)):
        param.grad._local_tensor.fill_(number).add_(param.to_local())
    optimizer.param_groups[number % 2]["lr"] = 1 / number


def compared(build, steps=5, change=lambda optimizer, number: None, **options):
    """Assert that steps with and without ``LocalShards`` are bit-identical; call ``change`` before each step.

    Returns:
        ``FusedAdam.inspected`` after each step with ``LocalShards``.
    """
    expected, optimizer = build(**options), build(**options)
    inspected, shards = [], None
    for number in range(1, steps + 1):
        for each in (expected, optimizer):
            prepare(each, number)
            change(each, number)
        expected.step()
        if shards is None or not shards.current():
            optimizer.step()
            shards = LocalShards(optimizer)
        else:
            with shards.in_place():
                optimizer.step()
        inspected.append(optimizer.inspected)
        assert values(optimizer) == values(expected)
    return inspected


@pytest.mark.parametrize("per_launch", [1024, 1])
def test_later_steps_inspect_one_parameter_per_group(build, per_launch):
    assert compared(build, per_launch=per_launch) == [6, 6, 3, 3, 3]


def test_each_step_restores_the_optimizer(build):
    optimizer = build()
    optimizer.step()
    params, state, launch = parameters(optimizer), optimizer.state, optimizer.multi_tensor_adam
    shards = LocalShards(optimizer)
    for _ in range(2):
        with shards.in_place():
            optimizer.step()
        assert all(this is that for this, that in zip(parameters(optimizer), params, strict=True))
        assert optimizer.state is state and optimizer.multi_tensor_adam is launch
    with pytest.raises(ZeroDivisionError), shards.in_place():
        raise ZeroDivisionError
    assert all(this is that for this, that in zip(parameters(optimizer), params, strict=True))
    assert optimizer.state is state and optimizer.multi_tensor_adam is launch


def test_steps_casting_states_are_not_replayed(build):
    assert compared(build, casts=True) == [6] * 5


def test_lists_of_new_gradients_are_not_reused(build):
    def change(optimizer, number):
        for param in filter(lambda param: param.grad is not None, parameters(optimizer)):
            param.grad = DTensor.from_local(param.grad.to_local().clone(), param.device_mesh, param.placements)

    assert compared(build, change=change) == [6] * 5


def other_gradient(param):
    param.grad = DTensor.from_local(torch.ones(param.shape), param.device_mesh, param.placements)
    param.grad.stays = True


def other_memory(param):
    param.grad._local_tensor = torch.full(param.shape, 2.0)


@torch.no_grad()
def other_storage(param):
    param.grad._local_tensor.set_(torch.full(param.shape, 2.0))


def no_gradient(param):
    param.grad = None


@pytest.mark.parametrize("change", [other_gradient, other_memory, other_storage, no_gradient])
def test_changed_gradients_are_listed_again(build, change):
    def change_one(optimizer, number):
        if number == 4:
            change(optimizer.param_groups[0]["params"][1])

    assert compared(build, steps=6, change=change_one) == [6, 6, 3, 6, 3, 3]


def test_replayed_step_without_launches_is_an_error(build):
    optimizer = build()
    optimizer.step()
    shards = LocalShards(optimizer)
    with shards.in_place():
        optimizer.step()
    with pytest.raises(RuntimeError, match="did not call multi_tensor_adam"), shards.in_place():
        pass
