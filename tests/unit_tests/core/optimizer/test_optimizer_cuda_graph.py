"""Test graphs of the optimizer step: gathers after replays, and eager steps after changes."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks.on_cpu_backend import on_cpu_backend

WARMUP = 2


@pytest.fixture(autouse=True)
def _cpu_backend():
    with on_cpu_backend(), torch.cuda.stream(torch.cuda.Stream()), mock.patch.object(dist, "barrier"):
        yield


class Optimizer(torch.optim.Optimizer):
    """A stand-in for ``DistributedOptimizer`` whose step adds the learning rate to a weight."""

    def __init__(self, capturable=True, **config):
        defaults = {"use_megatron_fsdp": True, "fsdp_all_gather_in_start_param_sync": True}
        self.model_chunks = [mock.Mock(ddp_config=SimpleNamespace(**defaults | config)) for _ in range(2)]
        self.weight = torch.zeros(1, device="cuda")
        self.weight.grad = torch.zeros(1, device="cuda")
        self.weight.grad.stays = True  # as under Megatron-FSDP
        first = {"params": [self.weight], "lr": 0.5, "capturable": capturable, "weight_decay": 0.0}
        super().__init__([first, {"params": [torch.zeros(1, device="cuda")], "lr": 0.25}], {})
        self.state[self.weight] = {"momentum": torch.zeros(1, device="cuda")}
        self.config = SimpleNamespace(clip_grad=1.0, use_precision_aware_optimizer=False)
        self.optimizer, self.eager_steps = self, 0

    def get_parameters(self):
        return [param for group in self.param_groups for param in group["params"]]

    def step(self):
        self.eager_steps += not torch.cuda.is_current_stream_capturing()
        self.weight.mul_(1 - self.param_groups[0]["weight_decay"]).add_(self.param_groups[0]["lr"])
        return True, self.weight, None

    def gathers(self):
        """Return the number of parameter gathers of each chunk."""
        return [chunk.start_param_sync.call_count for chunk in self.model_chunks]


@pytest.fixture
def wrap():
    """Return a function that wraps an optimizer's step; reset the wrapper class before and after the test."""
    from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

    def delete():
        OptimizerCudaGraphWrapper.cuda_graph, OptimizerCudaGraphWrapper.curr_iteration = None, 0

    delete()
    yield lambda optimizer: OptimizerCudaGraphWrapper(optimizer.step, cuda_graph_warmup_steps=WARMUP)
    delete()


def test_parameters_are_gathered_after_each_replay(wrap):
    optimizer = Optimizer()
    step = wrap(optimizer)
    seen = []
    for _ in range(WARMUP + 3):
        step()
        seen.append(optimizer.gathers())
    assert seen == [[0, 0], [0, 0], [1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("sharded", [True, False])
def test_gradients_keep_their_addresses_under_megatron_fsdp(wrap, sharded):
    optimizer = Optimizer(use_megatron_fsdp=sharded, megatron_fsdp_cuda_graph_mode=False)
    wrap(optimizer)
    assert [chunk.ddp_config.megatron_fsdp_cuda_graph_mode for chunk in optimizer.model_chunks] == [sharded] * 2
    kept = [chunk.param_and_grad_buffer.keep_gradients_in_place.called for chunk in optimizer.model_chunks]
    assert kept == [sharded] * 2


def test_graph_reads_the_learning_rate_of_each_step(wrap):
    optimizer = Optimizer()
    step = wrap(optimizer)
    rate, expected = optimizer.param_groups[0]["lr"], 0.0
    for number in range(WARMUP + 3):
        rate.fill_(number)
        expected += number
        step()
    assert optimizer.weight.item() == expected


CHANGES = {
    "weight_decay": lambda optimizer: optimizer.param_groups[0].update(weight_decay=0.5),
    "clip_grad": lambda optimizer: setattr(optimizer.config, "clip_grad", 0.5),
    "states": lambda optimizer: setattr(optimizer, "state", {}),  # same as load_state_dict
    "parameters": lambda optimizer: optimizer.param_groups[1]["params"].clear(),
    "gradients": lambda optimizer: setattr(optimizer.weight, "grad", None),
    "step hooks": lambda optimizer: optimizer.register_step_post_hook(mock.Mock(return_value=None)),
    "lr": lambda optimizer: optimizer.param_groups[0].update(lr=torch.full((), 0.25, device="cuda")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_steps_run_eagerly_after_a_change(wrap, caplog, name):
    optimizer, twin = Optimizer(), Optimizer()
    step = wrap(optimizer)
    for number in range(WARMUP + 5):
        if number == WARMUP + 2:
            CHANGES[name](optimizer)
            CHANGES[name](twin)
        step()
        twin.step()
    assert torch.equal(optimizer.weight, twin.weight)
    assert optimizer.eager_steps == WARMUP + 3
    assert optimizer.gathers() == [2, 2]  # eager steps start their own gathers
    (message,) = caplog.messages
    assert message.endswith(f"(--optimizer-cuda-graph): {name} changed after capture")


def test_second_optimizer_does_not_replay_the_first(wrap):
    first, second = Optimizer(), Optimizer()
    steps = wrap(first), wrap(second)
    for _ in range(2 * WARMUP + 2):
        for step in steps:
            step()
    assert torch.equal(first.weight, second.weight)
    assert first.eager_steps < second.eager_steps == 2 * WARMUP + 2
