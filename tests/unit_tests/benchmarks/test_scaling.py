"""scaling: what grows with layers and with micro-batches."""

from typing import Any

import pytest

from benchmarks._step_time import growth
from benchmarks.scaling import sizes


def row(layers: int, micro_batches: int, variant: str = "native", **figures: Any) -> dict[str, Any]:
    return {"variant": variant, "layers": layers, "micro_batches": micro_batches, "ms": 1.0, **figures}


def memory(layers: int, micro_batches: int, allocated: int, reserved: int) -> dict[str, Any]:
    return row(layers, micro_batches, max_allocated_mib=allocated, max_reserved_mib=reserved)


def test_each_number_is_varied_alone():
    assert sizes([8, 16], [1, 2, 4], all_pairs=False) == [(8, 1), (16, 1), (8, 2), (8, 4)]


def test_host_time_and_all_calls_come_from_the_profile():
    profile = {"host_ms": 3.0, "api_calls": {"cudaLaunchKernel": 4.0, "cudaEventQuery": 1.5}, "python_calls": 9}
    found = growth.row({"variant": "native", "ms": 2.0, "profile": profile}, 8, 1)
    assert (found["layers"], found["micro_batches"], found["host_ms"], found["api_calls"]) == (8, 1, 3.0, 5.5)


def test_a_layer_costs_the_slope_between_the_fewest_and_the_most_layers():
    rows = [row(16, 1, ms=40.0, graphs=40), row(8, 1, ms=30.0, graphs=16), row(32, 1, ms=54.0, graphs=64)]
    rows.append(row(64, 2, ms=900.0, graphs=0))
    assert growth.with_layers(rows) == {"native": {"ms": 1.0, "graphs": 2.0}}


@pytest.mark.parametrize(("allocated", "grows"), [(1000, False), (1015, False), (1016, True), (900, False)])
def test_memory_grows_if_tensors_take_more(allocated, grows):
    rows = [memory(8, 4, allocated, 3000), memory(8, 1, 1000, 2000), memory(8, 2, 1, 1), memory(16, 1, 5000, 6000)]
    (found,) = growth.with_micro_batches(rows)["native"]
    assert found == {
        "layers": 8,
        "micro_batches": [1, 4],
        "max_allocated_mib": [1000, allocated],
        "max_reserved_mib": [2000, 3000],
        "grows": grows,
    }
    assert growth.sentences(rows)[-1] == (
        f"native, 8 layers: memory {'grows' if grows else 'does not grow'} from 1 to 4 micro-batches: "
        f"allocated 1000 -> {allocated} MiB, reserved 2000 -> 3000 MiB"
    )
