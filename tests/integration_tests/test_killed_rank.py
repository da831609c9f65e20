"""Test that killing one rank during capture or replay ends the others with an error."""

import pytest

from tests.support.trainings.kill_a_rank import LAUNCHED, killed

TIMEOUT = 120  # seconds, for the process groups; longer than the skew between ranks on a busy machine

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _cpu_ranks(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


@pytest.mark.parametrize("holds", ["model", "layer"])
def test_killed_rank_during_replay_ends_the_other(holds):
    status, seconds, output = killed(TIMEOUT, holds)
    assert LAUNCHED in output
    assert status not in (0, -9)
    assert seconds < TIMEOUT
    assert "Connection closed by peer" in output or "Connection reset by peer" in output, output[-3000:]


def test_killed_rank_during_capture_ends_the_other():
    status, seconds, output = killed(TIMEOUT, "layer", in_capture=True)
    assert LAUNCHED not in output
    assert status not in (0, -9)
    assert seconds < TIMEOUT
    assert "rank 1 exited, or did not answer" in output
