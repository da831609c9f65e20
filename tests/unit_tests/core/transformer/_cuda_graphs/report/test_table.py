"""table: a report as lines of text."""

import pytest

from megatron.core.transformer._cuda_graphs.report.record import total
from megatron.core.transformer._cuda_graphs.report.table import in_bytes, table

from .reports import counts, report

TABLE = """\
CUDA graphs, native engine, rank 0:
  graphs                                                 forward  backward  weight gradients  warm-up s  capture s
  layer 1 (Layer) to layer 2 (Layer), recorded together        2         2                 0      0.500      1.000
  layer 3 (Layer) to layer 4 (Layer)                           4         4                 0      0.250      0.500
  all                                                          6         6                 0      0.750      1.500
  3.00 s in all, 0.50 s of them waiting for other ranks
  3 more graphs hold collectives alone
  memory allocated 100.0 MiB -> 120.0 MiB, reserved 200.0 MiB -> 300.0 MiB
  a pool of 80.0 MiB holds 12 graphs
  2 static inputs of 8.0 MiB serve 3 uses
  hook gather, 4 on layers: outside of graphs, as forward_pre_hooks
  hook <count>, 1 inside layers: recorded
  eager: embedding (Embedding), final_norm (Norm), because it is outside of layers
  eager: evaluation, because it is FP8"""


def test_layers_alike_are_one_row():
    assert table(report()) == TABLE


def test_the_whole_model_is_one_row():
    whole = report(whole_model=True, layers=(), graphs=counts(1, 1), hooks=(), static_inputs=(), collectives=0)
    lines = table(whole).splitlines()
    assert lines[2].split() == ["whole", "model", "1", "1", "0", "0.750", "1.500"]
    assert not any("static inputs" in line or "hook" in line or "more graphs" in line for line in lines)


def test_what_the_engine_does_not_show_is_a_question_mark():
    hidden = dict.fromkeys(counts(0, 0))
    layers = report().layers[2:]
    for layer in layers:
        layer.graphs = hidden
    lines = table(report(layers=layers, graphs=hidden, pools=())).splitlines()
    assert lines[2].split()[-5:] == ["?", "?", "?", "0.250", "0.500"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [([(1, 2, 3), (4, 5, 6)], (5, 7, 9)), ([(1, 2, None), (4, 5, 6)], (5, 7, None)), ([], (0, 0, 0))],
)
def test_a_sum_is_unknown_if_a_part_is(given, expected):
    assert total([counts(*each) for each in given]) == counts(*expected)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0.0 MiB"), (512, "0.5 KiB"), (2**20, "1.0 MiB"), (1536 * 2**20, "1,536.0 MiB")]
)
def test_bytes_have_a_unit(count, text):
    assert in_bytes(count) == text
