"""Test that metrics of CUDA graphs reach Megatron's writers at the log interval."""

from types import SimpleNamespace

import pytest

from megatron.core.transformer._cuda_graphs.te.capture_state import GraphUse
from megatron.training import global_vars
from megatron.training.cuda_graph_scalars import PAUSE, CudaGraphScalars

CAPTURED_AFTER, REPLAYS = 3, 4  # steps before capture, replays per step
MIB = 2**20


class Helper:
    """A stand-in for a graph helper that captures after three steps."""

    def __init__(self):
        self.steps = 0

    def eager_reason(self):
        return "before-capture" if self.steps <= CAPTURED_AFTER else ""

    def graph_use(self):
        captured = self.steps > CAPTURED_AFTER
        return GraphUse(REPLAYS * max(0, self.steps - CAPTURED_AFTER), int(captured), captured * 3 * MIB)


class TensorBoard:
    """A stand-in for ``SummaryWriter`` that records scalars."""

    def __init__(self):
        self.values = {}

    def add_scalar(self, name, value, step):
        self.values.setdefault(name.removeprefix("cuda-graphs/"), []).append((step, value))


class WandB(TensorBoard):
    """A stand-in for ``wandb`` that records scalars."""

    def log(self, scalars, step):
        for name, value in scalars.items():
            self.add_scalar(name, value, step)


class Loop:
    """A stand-in for Megatron's training loop."""

    def __init__(self, monkeypatch, interval=1, tensorboard=None, wandb=None):
        self.args = SimpleNamespace(iteration=0, curr_iteration=0, tensorboard_log_interval=interval)
        self.helper, self.scalars = Helper(), CudaGraphScalars()
        self.now, self.seconds = 100.0, PAUSE  # current time, and duration of a step
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", self.args)
        monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", tensorboard)
        monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", wandb)

    def train(self, steps):
        for iteration in range(steps):
            self.scalars(self.helper)
            self.args.curr_iteration = iteration
            self.helper.steps += 1
            self.now += self.seconds
        self.scalars(self.helper)


@pytest.fixture(params=[TensorBoard, WandB])
def loop(request, monkeypatch):
    """Return a factory of a loop and its writer."""

    def make(**options):
        writer = request.param()
        return Loop(monkeypatch, **options, **{request.param.__name__.lower(): writer}), writer

    return make


def test_values_of_each_iteration(loop):
    training, writer = loop()
    training.train(5)
    assert writer.values == {
        "replays": [(1, 0), (2, 0), (3, 0), (4, 4), (5, 4)],
        "captures": [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1)],
        "memory-mib": [(1, 0.0), (2, 0.0), (3, 0.0), (4, 3.0), (5, 3.0)],
        "eager-steps/before-capture": [(1, 1), (2, 1), (3, 1), (4, 0), (5, 0)],
    }


def test_values_of_an_interval_add_up(loop):
    training, writer = loop(interval=2)
    training.train(7)
    assert writer.values["replays"] == [(2, 0), (4, 4), (6, 8)]
    assert writer.values["eager-steps/before-capture"] == [(2, 2), (4, 1), (6, 0)]


def test_iteration_is_counted_once(loop):
    training, writer = loop()
    training.train(1)
    training.scalars(training.helper)
    assert writer.values["eager-steps/before-capture"] == [(1, 1)]


def test_short_steps_share_values_until_the_end(loop):
    training, writer = loop()
    training.seconds = PAUSE / 2
    training.train(6)
    assert writer.values["replays"] == [(1, 0), (3, 0), (5, 8)]
    assert writer.values["eager-steps/before-capture"] == [(1, 1), (3, 2), (5, 0)]
    for _ in range(2):
        training.scalars(training.helper, deleting=True)
    assert writer.values["replays"][3:] == [(6, 4)]


def test_both_writers_get_the_same_values(monkeypatch):
    tensorboard, wandb = TensorBoard(), WandB()
    Loop(monkeypatch, tensorboard=tensorboard, wandb=wandb).train(4)
    assert tensorboard.values == wandb.values
    assert len(wandb.values["replays"]) == 4
