"""Test that ``examples/training_loop.py`` has bit-identical losses with and without graphs."""

import re
from pathlib import Path

from tests.support.ranks.forked_ranks import ForkedRanks

LOOP = Path(__file__).resolve().parents[2] / "examples" / "training_loop.py"


def test_custom_loop_has_the_losses_of_eager_training(tmp_path):
    logs = [tmp_path / "graphs", tmp_path / "eager"]
    for log, options in zip(logs, ([], ["--eager"]), strict=True):
        ranks = ForkedRanks([str(LOOP), *options], log)
        assert ranks.ended(300) == 0, ranks.log_tail()
    graphed, eager = (re.findall(r"^step \d: loss (\S+)$", log.read_text(), re.MULTILINE) for log in logs)
    assert len(eager) == 8
    assert graphed == eager
    assert "rank 0: graphs captured: True" in logs[0].read_text()
