"""Test soak.py: detection of differences between two runs."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("soak")


def lines(first, last, loss="0x1p+0", graphs=2, reserved=64.0):
    step = {"loss_hex": loss, "grad_norm_hex": "0x1p+0", "skipped": False, "graphs": graphs, "reserved_mib": reserved}
    return [step | {"step": number} for number in range(first, last + 1)]


def test_differing_missing_and_eager_steps_are_listed(soak):
    graphed = lines(1, 6) + lines(7, 8, graphs=0) + lines(9, 10, loss="0x1.1p+0")
    found = soak.compare(20, 10, {"eager": lines(1, 20), "graphed": graphed, "resumed": lines(11, 19)})
    assert found["differing_steps"] == [9, 10, 20]
    assert found["without_graphs"] == [7, 8]
    assert found["sha256_graphed"] != found["sha256_eager"]
    assert found["flat"]


def test_memory_growth_in_the_second_half_is_not_flat(soak):
    growing = lines(11, 28) + lines(29, 30, reserved=66.0)
    found = soak.compare(30, 10, {"eager": lines(1, 30), "graphed": lines(1, 10), "resumed": growing})
    assert not found["flat"]
    assert found["grown_since_step_10_mib"] == {"eager": 0.0, "graphed": 0.0, "resumed": 2.0}
