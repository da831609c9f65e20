"""first_difference: the step, and what differs in it."""

import pytest

from tests.support.first_difference import first_difference

SUMS = {"embedding": (1.0, 2.0), "proj": (3.0, 4.0)}


def run(losses=(5.0, 4.0, 3.0), norms=(1.0, 0.9, 0.8), changed=None):
    sums = [dict(SUMS) for _ in losses]
    if changed is not None:
        sums[changed]["proj"] = (3.0, 4.5)
    return [*losses], [*norms], sums


def found(one, other):
    difference = first_difference(one, other)
    assert difference is not None
    return difference


def test_equal_runs_have_none():
    assert first_difference(run(), run()) is None


@pytest.mark.parametrize("step", [0, 1, 2])
def test_gradients_are_named(step):
    difference = found(run(), run(changed=step))
    assert (difference["step"], difference["gradients"]) == (step, ["proj"])


def test_losses_and_norms_are_compared_too():
    assert found(run(), run(losses=(5.0, 4.5, 3.0)))["losses"] == (4.0, 4.5)
    assert found(run(), run(norms=(1.0, 0.9, 0.7)))["norms"] == (0.8, 0.7)
