"""Steps with recorded tensor lists are bit-identical to the optimizer's own."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from megatron.core.optimizer.listed_step import ListedStep

SHAPES = ((4, 3), (5,), (0, 3), (2, 2), (6,), (0,))
GROUPS = ((0, 1, 2), (3, 4), (5,))  # the last group is empty on this rank


class FusedAdam(torch.optim.Optimizer):
    """A stand-in for TransformerEngine's ``FusedAdam``, which builds tensor lists and launches kernels in each step.

    Attributes:
        looked_at: The number of parameters inspected by the last step.
        casts: Whether launches use copies of the states.
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
        self.looked_at = 0
        for group in self.param_groups:
            if not group["params"]:  # as in versions before 2.19
                continue
            group["step"] += 1
            lists: tuple[list, list, list] = [], [], []
            for param in group["params"]:
                self.looked_at += 1
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
    """Return a factory of optimizers with three groups of DTensors, whose initial values are always the same."""

    def shard(shape, generator):
        return DTensor.from_local(torch.randn(shape, generator=generator), mesh, [Shard(0)])

    def build(**options):
        generator = torch.Generator().manual_seed(1)
        params = [torch.nn.Parameter(shard(shape, generator)) for shape in SHAPES]
        for param in params:
            if param.to_local().numel():
                param.grad = shard(param.shape, generator)
        return FusedAdam([{"params": [params[number] for number in group]} for group in GROUPS], **options)

    return build


def parameters(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def values(optimizer):
    """Return all values that a step changes."""
    tensors = [*parameters(optimizer), *(state["momentum"] for state in optimizer.state.values())]
    return [tensor.to_local().tolist() for tensor in tensors], [group["step"] for group in optimizer.param_groups]


@torch.no_grad()
def prepare(optimizer, number):
    """Overwrite gradients in place, and change the learning rate."""
    for param in filter(lambda param: param.grad is not None, parameters(optimizer)):
        param.grad._local_tensor.fill_(number).add_(param.to_local())
    optimizer.param_groups[number % 2]["lr"] = 1 / number


def inspected(build, steps=5, change=lambda optimizer, number: None, **options):
    """Compare training with and without lists, and return the number of parameters that each listed step inspected."""
    expected, optimizer = build(**options), build(**options)
    looked_at, listed = [], ListedStep(optimizer, "grad")
    for number in range(1, steps + 1):
        for each in (expected, optimizer):
            prepare(each, number)
            change(each, number)
        expected.step()
        with listed.running():
            optimizer.step()
        looked_at.append(optimizer.looked_at)
        assert values(optimizer) == values(expected)
    return looked_at


@pytest.mark.parametrize("per_launch", [1024, 1])
def test_later_steps_inspect_one_parameter_per_group(build, per_launch):
    assert inspected(build, per_launch=per_launch) == [6, 3, 3, 3, 3]


def test_an_exception_restores_parameters_and_launch(build):
    optimizer = build()
    listed = ListedStep(optimizer, "grad")
    before = parameters(optimizer), optimizer.multi_tensor_adam
    for _ in range(2):  # the first step records, the second replays
        with pytest.raises(ZeroDivisionError), listed.running():
            raise ZeroDivisionError
        params, launch = parameters(optimizer), optimizer.multi_tensor_adam
        assert [id(param) for param in params] == [id(param) for param in before[0]] and launch is before[1]
        with listed.running():
            optimizer.step()


def test_steps_that_cast_states_are_not_replayed(build):
    assert inspected(build, casts=True) == [6] * 5


def test_step_hooks_see_all_parameters(build):
    def hook(optimizer, number):
        if number == 3:
            optimizer.register_step_post_hook(lambda *unused: None)

    assert inspected(build, steps=4, change=hook) == [6, 3, 6, 6]


def other_gradient(param, optimizer):
    param.grad = DTensor.from_local(torch.ones(param.shape), param.device_mesh, param.placements)


def other_memory(param, optimizer):
    param.grad._local_tensor = torch.full(param.shape, 2.0)


def no_gradient(param, optimizer):
    param.grad = None


def other_state(param, optimizer):
    optimizer.state[param]["momentum"] = optimizer.state[param]["momentum"].clone()


def other_parameter(param, optimizer):
    new = torch.nn.Parameter(param.detach().clone())
    new.grad = param.grad
    optimizer.param_groups[0]["params"][1] = new


def other_local_tensor(param, optimizer):
    param._local_tensor = param._local_tensor.clone()


@pytest.mark.parametrize(
    "change", [other_gradient, other_memory, no_gradient, other_state, other_parameter, other_local_tensor]
)
def test_a_changed_input_is_recorded_again(build, change):
    def change_one(optimizer, number):
        if number == 4:
            change(optimizer.param_groups[0]["params"][1], optimizer)

    assert inspected(build, steps=6, change=change_one) == [6, 3, 3, 6, 3, 3]


def test_a_replayed_step_without_launches_is_an_error(build):
    optimizer = build()
    listed = ListedStep(optimizer, "grad")
    with listed.running():
        optimizer.step()
    with pytest.raises(RuntimeError, match="did not call multi_tensor_adam"), listed.running():
        pass
