"""Test that ``plan`` lists the documented graphs for each example."""

import pytest

from megatron_fsdp_cuda_graphs.plan import command
from tests.support.compatibility import WORKING

# An example for a package that is not installed.
ROWS = [row for row in WORKING if "mamba" not in row.flags]


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_graph_holds_the_documented_part(capsys, row):
    code = command.plan(["--world-size", "4", *row.line])
    text = capsys.readouterr()
    assert code == 0, text.out + text.err
    graphs = [each for each in text.out.splitlines() if each.startswith(("    forward of ", "    backward of "))]
    assert graphs
    parts = "parts" if "--cuda-graph-modules" in row.line else "layers"
    assert ("model" if any("whole" in each for each in graphs) else parts) == row.holds
