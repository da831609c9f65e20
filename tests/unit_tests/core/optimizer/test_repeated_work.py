"""Test that repeated work is captured if its addresses stay the same, and runs eagerly if they keep changing."""

import pytest
import torch

from megatron.core.optimizer.repeated_work import CAPTURES, EAGER_STEPS, RepeatedWork

pytestmark = pytest.mark.usefixtures("cpu_backend")


class Doubling:
    """Doubles a vector in place and returns its sum.

    Attributes:
        calls: The number of calls, excluding replays.
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


def test_work_is_replayed_after_the_eager_steps(work, doubling):
    sums = run(work, doubling, EAGER_STEPS + 3)
    assert [total.item() for total in sums] == [6.0, 12.0, 24.0, 48.0, 96.0]  # each result is a separate tensor
    assert doubling.calls == EAGER_STEPS + 1
    assert work.replays == 3


def test_changed_inputs_are_recaptured(work, doubling):
    run(work, doubling, EAGER_STEPS + 1)
    doubling.vector, old = torch.ones(3, device="cuda"), doubling.vector
    sums = run(work, doubling, EAGER_STEPS + 1)
    assert [total.item() for total in sums] == [6.0, 12.0, 24.0]
    assert old.tolist() == [2.0 ** (EAGER_STEPS + 1)] * 3
    assert work.replays == 2


def test_changing_inputs_run_eagerly(work, doubling, caplog):
    for _ in range(CAPTURES + 1):
        doubling.vector = torch.ones(3, device="cuda")
        sums = run(work, doubling, EAGER_STEPS + 2)
        assert [total.item() for total in sums] == [6.0, 12.0, 24.0, 48.0]
    assert work.replays == 2 * CAPTURES
    (warning,) = [record.getMessage() for record in caplog.records if "without a CUDA graph" in record.getMessage()]
    assert warning == "doubling runs without a CUDA graph: recapture limit reached (3 captures)"


def read_on_the_host(doubling):
    return doubling().item()


def without_a_tensor(doubling):
    doubling()
    return 1.0


def out_of_memory(doubling):
    total = doubling()
    if torch.cuda.is_current_stream_capturing():
        raise torch.cuda.OutOfMemoryError("out of memory")
    return total


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (read_on_the_host, "captur"),
        (without_a_tensor, "must return a tensor, got float"),
        (out_of_memory, "out of memory"),
    ],
)
def test_failed_capture_runs_eagerly(work, doubling, caplog, fail, reason):
    def failing():
        return fail(doubling)

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(EAGER_STEPS + 3):
            work.run(doubling.key(), failing)
        assert doubling.vector.tolist() == [2.0 ** (EAGER_STEPS + 3)] * 3
    (warning,) = [record.getMessage() for record in caplog.records if "without a CUDA graph" in record.getMessage()]
    assert warning.startswith("doubling") and reason in warning
    assert work.replays == 0
