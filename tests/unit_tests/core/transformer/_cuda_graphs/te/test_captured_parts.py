"""captured_parts: what is read off engines that show no graphs."""

from megatron.core.transformer._cuda_graphs.report.record import KINDS
from megatron.core.transformer._cuda_graphs.te.captured_parts import graph_counts, pools_of


def test_an_engine_that_shows_no_graphs_is_said_to():
    assert graph_counts(lambda: None) == dict.fromkeys(KINDS)
    assert pools_of([lambda: None]) == []
