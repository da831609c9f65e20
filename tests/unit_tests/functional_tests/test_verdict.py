"""Verdicts on cases."""

import pytest

from tests.functional_tests._runner import golden
from tests.functional_tests._runner.verdict import compare_with_golden, judge, record


@pytest.fixture
def eager(make_found):
    return make_found(graphs=0)


def test_case_equal_to_its_eager_one_passes(make_case, make_found, eager):
    verdict = judge(make_case(), make_found(), eager)
    assert verdict.passed
    assert verdict.compared == ["gpt/eager"]


def test_case_without_comparison_fails(make_case, make_found):
    verdict = judge(make_case(), make_found(), None)
    compare_with_golden(verdict, golden.path(make_case(), "h200", None))
    assert verdict.differences == []
    assert not verdict.passed
    assert verdict.notes == ["no golden values: there is no golden_values_h200.json; --record writes it"]


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"error": "rank 0: no memory"}, "failed: rank 0: no memory"),
        ({"losses": [], "norms": []}, "0 steps, not 3"),
        ({"graphs": 0}, "0 CUDA graphs with --cuda-graph-impl transformer_engine"),
    ],
)
def test_case_without_steps_or_graphs_fails(make_case, make_found, attributes, words):
    verdict = judge(make_case(), make_found(**attributes), None)
    assert words in verdict.differences
    assert not verdict.passed


def test_case_unlike_its_eager_one_fails(make_case, make_found, eager):
    assert judge(make_case(), make_found(), make_found(error="why")).differences == ["gpt/eager failed: why"]
    verdict = judge(make_case(), make_found(3.0, 2.5, 1.0), eager)
    assert not verdict.passed
    assert "lm loss 3" in verdict.differences[0]


def test_recorded_values_are_compared(make_case, make_found, eager):
    file = golden.path(make_case(), "h200", None)
    recording = judge(make_case(), make_found(), eager)
    record(recording, file)
    assert recording.passed and file.is_file()
    same, other = (judge(make_case(), found, None) for found in (make_found(), make_found(3.0, 2.5, 1.0)))
    for verdict in (same, other):
        compare_with_golden(verdict, file)
    assert same.passed and same.compared == ["golden_values_h200.json"]
    assert not other.passed
