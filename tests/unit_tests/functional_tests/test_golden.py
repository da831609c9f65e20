"""Comparison with golden values: exact on GPUs, with a tolerance on the CPU backend."""

import pytest

from benchmarks import results_file
from tests.functional_tests._runner import golden
from tests.support.trainings.rounding import ROUNDING


@pytest.fixture
def written(make_case, make_found):
    """Return golden values of a case."""
    case = make_case()
    file = golden.path(case, "h200", None)
    golden.write(file, case, make_found())
    return golden.read(file)


def test_equal_results_do_not_differ(make_case, make_found, written):
    assert golden.measured_elsewhere(written, make_case()) == []
    assert golden.differences(make_found(), written, make_case()) == []


def test_last_bit_of_a_loss_counts(make_case, make_found, written):
    (line,) = golden.differences(make_found(3.0, 2.5, 2.0 + 2**-51), written, make_case())
    assert line == "lm loss 3: 0x1.0000000000001p+1 (2), golden value 0x1.0000000000000p+1 (2)"


def test_cpu_backend_tolerates_rounding_only(make_case, make_found, written):
    case = make_case(on_cpu=True, bounds={})
    within = ROUNDING * case.steps
    assert golden.differences(make_found(3.0 * (1 - within), 2.5 * (1 + 0.9 * within), 2.0), written, case) == []
    (line,) = golden.differences(make_found(3.0, 2.5 * (1 + 1.1 * within), 2.0), written, case)
    assert line.startswith("lm loss 2: ")
    (line,) = golden.differences(make_found(3.0, 2.5, float("nan")), written, case)
    assert line.startswith("lm loss 3: nan")


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("norms", [(1.5).hex(), None, (1.5).hex()], "grad-norm 2: none, golden value 0x1.8"),
        ("evaluations", [], "evaluation lm loss 1: none"),
        ("evaluations", [(2.25).hex()] * 2, "evaluation lm loss 2: 0x1.2"),
        ("graphs", 3, "3 CUDA graphs, golden value 2"),
        ("measured", {"ms": 20.1}, "ms 20.1 is more than 2.0 times the golden value 10.0"),
    ],
)
def test_other_differences_are_named(make_case, make_found, written, attribute, value, words):
    (line,) = golden.differences(make_found(**{attribute: value}), written, make_case())
    assert words in line


def test_versions_and_hardware_must_match(make_case, written, monkeypatch):
    monkeypatch.setattr(golden, "versions", lambda: results_file.versions() | {"torch": "9.9", "python": "9"})
    monkeypatch.setattr(golden, "hardware", lambda gpus: f"{gpus} x another GPU")
    lines = golden.measured_elsewhere(written, make_case())
    assert [line.split()[0] for line in lines] == ["torch", "hardware"]
    assert lines[1].endswith("here 2 x another GPU")


def test_reference_is_compared_in_losses_and_norms_only(make_found):
    reference = make_found(graphs=0, measured={})
    assert golden.differences_from(reference, make_found(), "gpt/eager") == []
    (line,) = golden.differences_from(reference, make_found(3.0, 2.5, 1.75), "gpt/eager")
    assert line.endswith("gpt/eager 0x1.0000000000000p+1 (2)")
