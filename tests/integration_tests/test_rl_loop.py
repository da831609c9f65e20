"""Test that ``examples/rl_loop.py`` prints the same numbers with and without graphs."""

import re
from pathlib import Path

from tests.support.ranks.forked_ranks import ForkedRanks

LOOP = Path(__file__).resolve().parents[2] / "examples" / "rl_loop.py"


def test_rl_loop_has_the_numbers_of_eager_training(tmp_path):
    logs = {impl: tmp_path / impl for impl in ("none", "transformer_engine")}
    for impl, log in logs.items():
        ranks = ForkedRanks([str(LOOP), "--cuda-graph-impl", impl], log)
        assert ranks.ended(600) == 0, ranks.log_tail()
    eager, graphed = (
        re.findall(r"^iteration \d, epoch \d: (.+)$", log.read_text(), re.MULTILINE) for log in logs.values()
    )
    assert len(set(eager)) == 8
    assert graphed == eager
    shown = logs["transformer_engine"].read_text()
    assert "rank 0: graphs captured: True" in shown
    # The policy and the reference model, in two iterations after the capture
    assert shown.count("Captured the whole model for evaluation") >= 4
    assert len(re.findall(r"^iteration \d, \S+: allocated .* reserved", shown, re.MULTILINE)) == 16
