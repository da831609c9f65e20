"""Tests the selection of tests that run in `make test`."""

import pytest

from tests.support.sample import each_once, mostly_long


def quick(parameters):
    return [found.values for found in parameters if not found.marks]


def test_each_once_marks_combinations_that_repeat_values():
    found = each_once("abc", (1, 2))
    assert len(found) == 6
    assert quick(found) == [("a", 1), ("b", 2), ("c", 1)]


def test_mostly_long_marks_other_cases():
    assert quick(mostly_long(["a", "b", "c"], "b")) == [("b",)]
    assert quick(mostly_long([("a", 1), ("b", 2)], ("b", 2))) == [("b", 2)]


def test_unknown_quick_case_is_an_error():
    with pytest.raises(ValueError, match="not among the cases: \\['d'\\]"):
        mostly_long(["a"], "d")
