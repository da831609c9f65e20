"""Test timeline.py: the blocks of a traced step."""

from benchmarks import timeline
from benchmarks._step_time.step_profile import STEPS

STEP = 10_000.0  # microseconds


def event(category: str, name: str, start: float, end: float) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start}


def traced_steps() -> list[dict]:
    """Return the trace events of identical steps, plus one extra kernel in the first."""
    steps = [
        event(category, name, step * STEP + start, step * STEP + end)
        for step in range(STEPS)
        for category, name, start, end in (
            ("cuda_runtime", "cudaGraphLaunch", 0.0, 1000.0),
            ("kernel", "gemm", 1000.0, 4000.0),
            ("gpu_memcpy", "Memcpy HtoD", 4010.0, 5000.0),
            ("kernel", "ncclDevKernel_AllGather_RING_LL", 2000.0, STEP),
            ("cpu_op", "aten::mm", 0.0, STEP),
        )
    ]
    return [*steps, event("kernel", "warm-up", 6000.0, 7000.0)]


def test_blocks_of_the_second_step_are_in_three_lanes():
    assert timeline.blocks(traced_steps()) == {
        "host": [(0.0, 1.0)],
        "compute": [(1.0, 5.0)],
        "collectives": [(2.0, 10.0)],
    }
