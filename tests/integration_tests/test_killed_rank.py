"""A rank that is killed in the middle of a step of replays ends the others with an error."""

import pytest

from tests.support.kill_a_rank import LAUNCHED, killed_in_mid_replay

TIMEOUT = 30  # seconds, of the process groups


@pytest.mark.parametrize("layers_per_graph", [0, 1])
def test_the_other_rank_ends_with_an_error_that_says_so(monkeypatch, layers_per_graph):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    status, seconds, output = killed_in_mid_replay(TIMEOUT, layers_per_graph)
    assert LAUNCHED in output
    assert status not in (0, -9)
    assert seconds < TIMEOUT + 15
    assert "Connection closed by peer" in output or "Connection reset by peer" in output, output[-3000:]
