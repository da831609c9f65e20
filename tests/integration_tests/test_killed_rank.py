"""A rank that is killed in a capture, or in the middle of a step of replays, ends the others with an error."""

import pytest

from tests.support.trainings.kill_a_rank import LAUNCHED, killed

TIMEOUT = 120  # seconds, of the process groups: more than a rank on a busy machine is late


@pytest.fixture(autouse=True)
def _cpu_ranks(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


@pytest.mark.parametrize("holds", ["decoder", pytest.param("layer", marks=pytest.mark.long)])
def test_the_other_rank_ends_with_an_error_that_says_so(holds):
    status, seconds, output = killed(TIMEOUT, holds)
    assert LAUNCHED in output
    assert status not in (0, -9)
    assert seconds < TIMEOUT
    assert "Connection closed by peer" in output or "Connection reset by peer" in output, output[-3000:]


def test_in_a_capture_the_time_limit_of_the_process_groups_holds():
    status, seconds, output = killed(TIMEOUT, "layer", in_capture=True)
    assert LAUNCHED not in output
    assert status not in (0, -9)
    assert seconds < TIMEOUT
    assert "rank 1 did not come to where rank 0 waited for it in a CUDA graph capture, for 0:00:02" in output
