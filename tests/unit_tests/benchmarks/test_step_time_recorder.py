"""Test step_time.py: recorded times, losses and gradient norms."""

import time

import pytest
import torch

from benchmarks._step_time.recorder import Recorder


@pytest.fixture
def clock(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))


def record(steps: int, **more) -> Recorder:
    found = Recorder(**more)
    for step in range(1, steps + 1):
        found.record(step, {"lm loss": torch.tensor(float(step))}, 0.1 * step)
    return found


def test_step_time_starts_at_the_end_of_the_previous_step(clock):
    found = record(5).milliseconds(3, 5)
    assert found == {"ms": 3000.0, "ms_mean": 3000.0, "ms_min": 2000.0, "ms_max": 4000.0}


def test_step_time_is_the_mean_between_two_logged_steps(clock):
    found = record(5).milliseconds(3, 5, every=2)
    assert found == {"ms": 2500.0, "ms_mean": 2500.0, "ms_min": 2500.0, "ms_max": 2500.0}


def test_numbers_are_exact():
    assert record(2).numbers() == [[float(1).hex(), (0.1).hex()], [float(2).hex(), (0.2).hex()]]


def test_recorded_tensors_survive_overwriting():
    loss, norm = torch.tensor(1.0), torch.tensor(2.0)
    found = Recorder()
    found.record(1, {"lm loss": loss}, norm)
    loss.fill_(5.0)
    norm.fill_(5.0)
    assert found.numbers() == [[float(1).hex(), float(2).hex()]]
