"""Samples of combinations: each value is in `make test`, and nothing is lost."""

import pytest

from tests.support.sample import each_once, mostly_long


def quick(parameters):
    return [found.values for found in parameters if not found.marks]


def test_each_value_is_in_a_quick_combination_and_all_combinations_are_there():
    found = each_once("abc", (1, 2))
    assert len(found) == 6
    assert quick(found) == [("a", 1), ("b", 2), ("c", 1)]


def test_all_but_the_quick_cases_are_long():
    assert quick(mostly_long(["a", "b", "c"], "b")) == [("b",)]
    assert quick(mostly_long([("a", 1), ("b", 2)], ("b", 2))) == [("b", 2)]


def test_a_quick_case_that_is_none_is_named():
    with pytest.raises(ValueError, match="no cases: \\['d'\\]"):
        mostly_long(["a"], "d")
