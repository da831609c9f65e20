"""Tests the counts of eager passes by shape and reason."""

import pytest

from megatron.core.transformer._cuda_graphs.eager_passes import EagerPasses

SHORT, LONG = (8, 2), (16, 2)


def passes_of(*shapes):
    passes = EagerPasses()
    for shape in shapes:
        passes.note("another shape", shape)
    return passes


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([LONG, LONG, LONG], LONG),
        ([LONG, LONG], None),  # the third pass was replayed
        ([LONG, SHORT, LONG], None),
        ([LONG] * 4, None),
        ([], None),
    ],
)
def test_shape_needs_all_passes(shapes, expected):
    assert passes_of(*shapes).shape_of_all(3) == expected


def test_shape_restarts_the_count():
    passes = passes_of(SHORT)
    assert passes.shape_of_all(1) == SHORT
    assert passes.shape_of_all(1) is None
    passes.note("another shape", LONG)
    assert passes.shape_of_all(1) == LONG


def test_only_the_first_pass_with_a_reason_is_new():
    passes = EagerPasses()
    assert [passes.note(reason) for reason in ("hook", "hook", "mask", "hook")] == [True, False, True, False]
    assert passes.total == 4
    assert passes.shape_of_all(4) is None
