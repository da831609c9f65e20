"""Work of every step becomes a graph once it has been the same, and goes on eagerly where it cannot."""

import gc

import pytest
import torch

from megatron.core.optimizer.repeated_work import CAPTURES, EAGER_STEPS, RepeatedWork

pytestmark = pytest.mark.usefixtures("cpu_backend")


class Doubling:
    """Doubles a vector in place and returns the sum of it.

    Attributes:
        calls: How often it ran, which a replay does not.
    """

    def __init__(self):
        self.vector = torch.ones(3, device="cuda")
        self.calls = 0

    def __call__(self):
        self.calls += 1
        self.vector.mul_(2)
        return self.vector.sum()

    def key(self):
        return [self.vector.data_ptr()]


@pytest.fixture
def doubling():
    return Doubling()


@pytest.fixture
def work():
    return RepeatedWork("doubling")


def run(work, doubling, steps):
    with torch.cuda.stream(torch.cuda.Stream()):
        return [work.run(doubling.key(), doubling) for _ in range(steps)]


def test_it_is_replayed_from_the_third_step_on(work, doubling):
    sums = run(work, doubling, EAGER_STEPS + 3)
    assert [total.item() for total in sums] == [6.0, 12.0, 24.0, 48.0, 96.0]  # each a tensor of its own
    assert doubling.calls == EAGER_STEPS + 1
    assert work.replays == 3


def test_another_key_is_captured_anew(work, doubling):
    run(work, doubling, EAGER_STEPS + 1)
    doubling.vector, old = torch.ones(3, device="cuda"), doubling.vector
    sums = run(work, doubling, EAGER_STEPS + 1)
    assert [total.item() for total in sums] == [6.0, 12.0, 24.0]
    assert old.tolist() == [2.0 ** (EAGER_STEPS + 1)] * 3
    assert work.replays == 1


def test_work_that_keeps_changing_is_left_alone(work, doubling, caplog):
    for _ in range(CAPTURES + 1):
        doubling.vector = torch.ones(3, device="cuda")
        sums = run(work, doubling, EAGER_STEPS + 2)
        assert [total.item() for total in sums] == [6.0, 12.0, 24.0, 48.0]
    calls = doubling.calls
    run(work, doubling, 2)
    assert doubling.calls == calls + 2
    assert work.replays == 0
    assert [record.getMessage() for record in caplog.records if "has moved 3 times" in record.getMessage()]


def test_garbage_is_not_collected_in_a_capture(work, doubling):
    collects = []

    def noting():
        collects.append(gc.isenabled())
        return doubling()

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(EAGER_STEPS + 1):
            work.run(doubling.key(), noting)
    assert collects == [True] * EAGER_STEPS + [False]


def read_on_the_host(doubling):
    return doubling().item()


def without_a_tensor(doubling):
    doubling()
    return 1.0


def out_of_memory(doubling):
    total = doubling()
    if torch.cuda.is_current_stream_capturing():
        raise torch.cuda.OutOfMemoryError("out of memory, as it were")
    return total


@pytest.mark.parametrize(
    ("fail", "reason"),
    [(read_on_the_host, "captur"), (without_a_tensor, "returns float"), (out_of_memory, "as it were")],
)
def test_work_that_cannot_be_captured_runs_eagerly(work, doubling, caplog, fail, reason):
    def failing():
        return fail(doubling)

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(EAGER_STEPS + 3):
            work.run(doubling.key(), failing)
        assert doubling.vector.tolist() == [2.0 ** (EAGER_STEPS + 3)] * 3
    (warning,) = [record.getMessage() for record in caplog.records if "without a CUDA graph" in record.getMessage()]
    assert warning.startswith("doubling") and reason in warning
    assert work.replays == 0


def test_after_a_reset_it_begins_anew(work, doubling):
    run(work, doubling, EAGER_STEPS + 1)
    work.reset()
    calls = doubling.calls
    assert [total.item() for total in run(work, doubling, EAGER_STEPS + 2)] == [48.0, 96.0, 192.0, 384.0]
    assert doubling.calls == calls + EAGER_STEPS + 1
