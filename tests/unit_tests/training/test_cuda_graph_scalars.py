"""Scalars on CUDA graphs go to the writers of Megatron's training, at the iterations at which it writes its own."""

from types import SimpleNamespace

import pytest

from megatron.core.transformer._cuda_graphs.te.capture_state import GraphUse
from megatron.training import cuda_graph_scalars, global_vars
from megatron.training.cuda_graph_scalars import PAUSE, CudaGraphScalars

CAPTURED_AFTER, REPLAYS = 3, 4  # steps, replays in a step
MIB = 2**20


class Helper:
    """A helper that captures after three steps."""

    def __init__(self):
        self.steps = 0

    def eager_reason(self):
        return "before-capture" if self.steps <= CAPTURED_AFTER else ""

    def graph_use(self):
        captured = self.steps > CAPTURED_AFTER
        return GraphUse(REPLAYS * max(0, self.steps - CAPTURED_AFTER), int(captured), captured * 3 * MIB)


class TensorBoard:
    """Notes scalars as ``SummaryWriter`` takes them."""

    def __init__(self):
        self.values = {}

    def add_scalar(self, name, value, step):
        self.values.setdefault(name.removeprefix("cuda-graphs/"), []).append((step, value))


class WandB(TensorBoard):
    """Notes scalars as ``wandb`` takes them."""

    def log(self, scalars, step):
        for name, value in scalars.items():
            self.add_scalar(name, value, step)


class Loop:
    """Megatron's training loop, as far as ``CudaGraphScalars`` sees it.

    Attributes:
        args: The arguments.
        helper: The helper.
        now: Seconds.
    """

    def __init__(self, monkeypatch, first=0, interval=1, tensorboard=None, wandb=None):
        self.args = SimpleNamespace(iteration=first, curr_iteration=0, tensorboard_log_interval=interval)
        self.helper, self.now = Helper(), 100.0
        self._scalars = CudaGraphScalars()
        monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", self.args)
        monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", tensorboard)
        monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", wandb)
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    def ask(self):
        """Do what ``before_step`` does."""
        self._scalars(self.helper)

    def end(self):
        """Do what ``delete_cuda_graphs`` does."""
        self._scalars(self.helper, deleting=True)

    def train(self, steps, skipped=()):
        """Train so many steps, but for the iterations that are skipped."""
        first = self.args.iteration
        for iteration in range(first, first + steps):
            self.ask()
            if iteration not in skipped:
                self.args.curr_iteration = iteration
                self.helper.steps += 1
                self.now += PAUSE
        self.ask()


@pytest.fixture(params=[TensorBoard, WandB])
def loop(request, monkeypatch):
    """A function that makes a loop with one writer, which is returned beside it."""

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


def test_an_iteration_counts_once_however_often_it_is_asked_for(loop):
    training, writer = loop()
    training.train(1)
    training.ask()
    assert writer.values["eager-steps/before-capture"] == [(1, 1)]


def test_values_are_apart_in_time_and_none_is_lost(loop, monkeypatch):
    training, writer = loop()
    monkeypatch.setattr(cuda_graph_scalars, "PAUSE", 2 * PAUSE)
    training.train(6)
    assert writer.values["replays"] == [(1, 0), (3, 0), (5, 8)]
    assert writer.values["eager-steps/before-capture"] == [(1, 1), (3, 2), (5, 0)]


@pytest.mark.parametrize("interval", [1, 4])
def test_the_end_writes_what_is_left_wherever_it_is(loop, monkeypatch, interval):
    training, writer = loop(interval=interval)
    monkeypatch.setattr(cuda_graph_scalars, "PAUSE", 10 * PAUSE)
    training.train(6)
    training.end()
    training.end()
    first = 1 if interval == 1 else 4
    assert writer.values["replays"] == [(first, 4 * (first > 3)), (6, 12 - 4 * (first > 3))]
    assert writer.values["captures"][-1] == (6, 1)


def test_both_writers_get_the_same(monkeypatch):
    tensorboard, wandb = TensorBoard(), WandB()
    Loop(monkeypatch, tensorboard=tensorboard, wandb=wandb).train(4)
    assert tensorboard.values == wandb.values
    assert len(wandb.values["replays"]) == 4
