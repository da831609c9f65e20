"""rerun_agreement: the benchmark runs on two ranks; what it measures on a CPU means nothing."""

import json
from pathlib import Path

from tests.support.forked_ranks import ForkedRanks

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "rerun_agreement.py"


def test_hosts_and_devices_agree_with_a_graph_and_without(tmp_path):
    output = tmp_path / "results.json"
    sizes = ["--products", "3", "--size", "8", "--times", "2"]
    ranks = ForkedRanks([str(SCRIPT), *sizes, "--output", str(output)], tmp_path / "log")
    assert ranks.ended(600) == 0, ranks.log_tail()
    rows = json.loads(output.read_text())["results"]
    assert [(row["graph"], row["through"]) for row in rows] == [
        (False, "devices"),
        (False, "hosts"),
        (True, "devices"),
        (True, "hosts"),
    ]
    assert all(0 < row["agreed_ms"] <= row["done_ms"] for row in rows)
    assert "'through': 'hosts'" in ranks.log_tail()
