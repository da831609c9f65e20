"""What a row of the table of flags says that a graph holds is what ``plan`` says of its example."""

import pytest

from megatron.core.transformer._cuda_graphs.flags.options import MEGATRON_FSDP
from megatron_fsdp_cuda_graphs.plan import command
from tests.support.compatibility import WORKING, command_line

# Their examples name a file that is not there, or need a package that is not installed.
NOT_PLANNED = {"heterogeneous layers", "hybrid models"}
ROWS = [row for row in WORKING if row.sharding == MEGATRON_FSDP]


def held(lines: list[str], modules: bool) -> str:
    graphs = [line for line in lines if line.startswith(("    forward of ", "    backward of "))]
    assert graphs
    if any("whole" in line for line in graphs):
        return "model"
    return "parts" if modules else "layers"


@pytest.mark.long
@pytest.mark.parametrize("row", [row for row in ROWS if row.name not in NOT_PLANNED], ids=lambda row: row.name)
def test_a_graph_holds_what_the_row_says(capsys, row):
    line = command_line(row.example)
    code = command.plan(["--world-size", "4", *line])
    text = capsys.readouterr()
    assert code == 0, text.out + text.err
    assert held(text.out.splitlines(), "--cuda-graph-modules" in line) == row.holds


def test_every_row_that_works_says_what_a_graph_holds():
    assert {row.holds for row in WORKING} == {"model", "layers", "parts"}
