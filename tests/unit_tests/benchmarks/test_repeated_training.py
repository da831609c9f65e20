"""Test repeated_training.py: comparison of repeated runs."""

from benchmarks.repeated_training import compared, first_difference


def run(loss="0x1p+0", weight=1):
    step = {"rank 0: weight": 1, "rank 0: gradient of weight": 2}
    return {"numbers": [["0x1p+1", "0x1p+0"], [loss, "0x1p+0"]], "found": [step, step | {"rank 0: weight": weight}]}


def test_first_difference_is_named():
    found = compared([run(), run(weight=3), {"error": "exit code 1"}], run())
    assert found == {
        "runs": 3,
        "equal": 1,
        "results": 2,
        "differences": ["exit code 1", "step 2: 1 of 4 values, for example rank 0: weight"],
    }


def test_gradients_are_named_before_weights():
    one = [{"loss": 1, "rank 0: gradient of weight": 2, "rank 0: weight": 3}]
    other = [{"loss": 1, "rank 0: gradient of weight": 0, "rank 0: weight": 0}]
    assert first_difference(one, other) == "step 1: 2 of 3 values, for example rank 0: gradient of weight"
