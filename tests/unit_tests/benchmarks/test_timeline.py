"""timeline: a step's bars from a trace."""

import json

import pytest

from benchmarks.timeline import CALLS, COLLECTIVES, COMPUTE, HOST, REPLAYS, WAITS, lane_and_kind, main, one_step, parse


def event(category: str, name: str, start: float = 0.0, duration: float = 1000.0) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


@pytest.mark.parametrize(
    ("category", "name", "expected"),
    [
        ("kernel", "gemm", (COMPUTE, COMPUTE)),
        ("gpu_memset", "Memset", (COMPUTE, COMPUTE)),
        ("kernel", "ncclDevKernel_AllGather_RING_LL", (COLLECTIVES, COLLECTIVES)),
        ("cuda_runtime", "cudaGraphLaunch_v10000", (HOST, REPLAYS)),
        ("cuda_runtime", "cudaStreamSynchronize", (HOST, WAITS)),
        ("cuda_runtime", "cudaMemcpyAsync", (HOST, WAITS)),
        ("cuda_driver", "cuLaunchKernelEx", (HOST, CALLS)),
        ("overhead", "Activity Buffer Request", None),
    ],
)
def test_each_event_has_its_lane(category, name, expected):
    assert lane_and_kind(event(category, name)) == expected


def test_a_short_copy_does_not_wait():
    assert lane_and_kind(event("cuda_runtime", "cudaMemcpyAsync", duration=10.0)) == (HOST, CALLS)


def test_a_step_is_an_equal_part_of_the_trace_and_bars_are_cut_at_its_ends():
    events = [
        event("cuda_runtime", "cudaLaunchKernel", 1000.0, 1000.0),
        event("kernel", "gemm", 2500.0, 1000.0),
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 6000.0, 1000.0),
        event("overhead", "Buffer Flush", 0.0, 90000.0),
    ]
    bars, length = one_step(events, steps=3, step=1)
    assert length == 2.0
    assert bars == {(HOST, CALLS): [(0.0, 1.0)], (COMPUTE, COMPUTE): [(1.5, 0.5)]}
    assert one_step(events, steps=3, step=2)[0] == {(COMPUTE, COMPUTE): [(0.0, 0.5)]}


def test_a_trace_without_cuda_is_an_error():
    with pytest.raises(ValueError, match="no CUDA calls"):
        one_step([event("cpu_op", "aten::mm")], steps=3, step=1)


@pytest.mark.parametrize("arguments", [["--step", "4"], ["--step", "0"], ["no title"]])
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        parse(["out.png", "a=b", *arguments])


def test_a_picture_is_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [event("kernel", "gemm"), event("cuda_runtime", "cudaLaunchKernel")]}))
    output = tmp_path / "out.png"
    monkeypatch.setattr("sys.argv", ["timeline.py", str(output), f"before={trace}", f"after={trace}"])
    main()
    assert output.read_bytes().startswith(b"\x89PNG")
