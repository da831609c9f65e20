"""What an allocator's memory is used for."""

from benchmarks._step_time.memory_sites import peaks, summary

MIB = 2**20
LAYER = [
    {"filename": "/x/torch/nn/functional.py", "line": 1, "name": "linear"},
    {"filename": "/x/megatron/core/layer.py", "line": 7, "name": "forward"},
]
SEGMENTS = [
    {
        "address": 1000 * MIB,
        "total_size": 20 * MIB,
        "stream": 5,
        "segment_pool_id": (0, 0),
        "blocks": [
            {"state": "active_allocated", "size": 4 * MIB, "frames": LAYER},
            {"state": "inactive", "size": 16 * MIB},
        ],
    },
    {
        "address": 2000 * MIB,
        "total_size": 10 * MIB,
        "stream": 9,
        "segment_pool_id": (0, 3),
        "blocks": [{"state": "active_pending_free", "size": 10 * MIB, "frames": []}],
    },
]


def event(action: str, address: int, size: int, frames: list | None = None) -> dict:
    return {"action": action, "addr": address * MIB, "size": size * MIB, "frames": frames or []}


def test_memory_is_told_by_pool_and_by_the_line_that_allocated_it():
    found = summary(SEGMENTS)
    assert found["pools"] == {
        "eager, stream 0": {"segments": 1, "reserved": 20.0, "used": 4.0},
        "graphs, stream 1": {"segments": 1, "reserved": 10.0, "used": 10.0},
    }
    assert found["gaps"] == {"megatron/core/layer.py:7 forward": 16.0}
    assert found["sites"] == {"eager": {"megatron/core/layer.py:7 forward": 4.0}, "graphs": {"not known": 10.0}}


def test_peaks_show_what_was_used_at_the_same_time_in_each_pool():
    trace = [
        event("segment_alloc", 2000, 10),
        event("alloc", 2000, 6, LAYER),
        event("free_completed", 2000, 6),
        event("alloc", 2000, 3, LAYER),
        event("alloc", 1000, 1),
        event("alloc", 2004, 4),
        event("free_requested", 2004, 4),
        event("free_completed", 2004, 4),
        event("free_completed", 999, 1),
        event("alloc", 2004, 1),
    ]
    assert peaks(SEGMENTS, trace) == {
        "graphs": {"used": 7.0, "sites": {"not known": 4.0, "megatron/core/layer.py:7 forward": 3.0}},
        "eager": {"used": 1.0, "sites": {"not known": 1.0}},
    }
