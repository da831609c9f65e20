"""Test that ``plan`` lists the documented graphs for each example."""

import pytest

from megatron.core.transformer._cuda_graphs.flags.options import MEGATRON_FSDP
from megatron_fsdp_cuda_graphs.plan import command
from tests.support.compatibility import WORKING, command_line

# Examples with a nonexistent file, or for a package that is not installed.
NOT_PLANNED = {"heterogeneous layers", "hybrid models"}
ROWS = [row for row in WORKING if row.sharding == MEGATRON_FSDP and row.name not in NOT_PLANNED]


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_graph_holds_the_documented_part(capsys, row):
    line = command_line(row.example)
    code = command.plan(["--world-size", "4", *line])
    text = capsys.readouterr()
    assert code == 0, text.out + text.err
    graphs = [each for each in text.out.splitlines() if each.startswith(("    forward of ", "    backward of "))]
    assert graphs
    parts = "parts" if "--cuda-graph-modules" in line else "layers"
    assert ("model" if any("whole" in each for each in graphs) else parts) == row.holds
