"""Test that losses accumulate over steps without synchronizing, with the same sums as in megatron-core."""

import inspect
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.training import training
from megatron_fsdp_cuda_graphs.overlay import upstream
from tests.support.ranks.on_cpu_backend import on_cpu_backend

UPSTREAM = upstream("megatron.training.training")


class AddedUp(Exception):
    """Raised after ``training_log`` has accumulated the losses of a step."""


class Args:
    """Training arguments that stop ``training_log`` once it has accumulated the losses."""

    tensorboard_log_interval = 2

    @property
    def timing_log_level(self):
        raise AddedUp


@pytest.fixture(autouse=True)
def _megatron(monkeypatch):
    for name in ("get_timers", "get_wandb_writer", "get_one_logger", "get_energy_monitor", "get_tensorboard_writer"):
        monkeypatch.setattr(training, name, lambda: None)
    monkeypatch.setattr(training, "get_args", Args)
    with on_cpu_backend():
        yield


def totals(log, steps):
    """Call ``log`` for each step; return the loss sums per step, and the total number of ``torch.tensor`` calls."""
    sums: dict[str, torch.Tensor] = {}
    after, made = [], 0
    for number, (losses, skipped) in enumerate(steps, 1):
        given = dict.fromkeys(inspect.signature(UPSTREAM.training_log).parameters)
        given |= {"loss_dict": losses, "total_loss_dict": sums, "iteration": number, "skipped_iter": skipped}
        with mock.patch.object(torch, "tensor", wraps=torch.tensor) as tensor, pytest.raises(AddedUp):
            log(*given.values())
        made += tensor.call_count
        after.append({name: float(value) for name, value in sums.items()})
    return after, made


def steps(*losses, skipped=()):
    values = [torch.tensor(loss, device="cuda") for loss in losses]
    return [({"lm loss": value, "mtp loss": value * 3}, int(n in skipped)) for n, value in enumerate(values)]


@pytest.mark.parametrize("skipped", [(), (0,), (1, 2)], ids=str)
def test_sums_are_bit_identical_to_megatron_core(skipped):
    trained = steps(0.1, 2.7, 1e-8, [3.3], -0.0, skipped=skipped)
    ours, made = totals(training.training_log, trained)
    theirs, made_there = totals(UPSTREAM.training_log, trained)
    assert ours == theirs and ours[-1]["lm loss"] > 3
    assert (made, made_there) == (0, 2 * (len(trained) - len(skipped)))


def test_losses_for_tensorboard_are_left_to_megatron_core(monkeypatch):
    monkeypatch.setattr(training, "get_tensorboard_writer", object)
    trained = steps(0.1, 2.7, 1e-8, 3.3)
    ours, made = totals(training.training_log, trained)
    assert ours == totals(UPSTREAM.training_log, trained)[0]
    assert made == 2 * 2  # for two losses, in the second and fourth steps
