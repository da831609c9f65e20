"""Figures from a trace of torch's profiler."""

import gzip
import json

import pytest

from benchmarks._step_time.cuda_trace import covered, figures, read_events


def event(category: str, name: str, start: float, duration: float) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


def runtime(name: str, duration: float = 1.0) -> dict:
    return event("cuda_runtime", name, 0.0, duration)


@pytest.mark.parametrize(
    ("intervals", "time"),
    [
        ([], 0.0),
        ([(0.0, 2.0), (5.0, 6.0)], 3.0),
        ([(4.0, 6.0), (0.0, 5.0)], 6.0),
        ([(0.0, 9.0), (1.0, 2.0), (3.0, 4.0)], 9.0),
        ([(0.0, 2.0), (2.0, 3.0)], 3.0),
    ],
)
def test_time_that_several_intervals_cover_counts_once(intervals, time):
    assert covered(intervals) == time


@pytest.mark.parametrize("compress", [False, True])
def test_only_events_with_a_duration_are_read(tmp_path, compress):
    kernel = event("kernel", "gemm", 1.0, 2.0)
    content = json.dumps({"traceEvents": [kernel, {"ph": "M", "name": "process_name"}, {"ph": "s", "name": "flow"}]})
    path = tmp_path / ("trace.json.gz" if compress else "trace.json")
    path.write_bytes(gzip.compress(content.encode()) if compress else content.encode())
    assert read_events(path) == [kernel]


def test_api_calls_are_counted_for_each_step():
    names = ["cudaLaunchKernel"] * 4 + ["cuLaunchKernelEx", "cudaLaunchKernelExC_v11060"]
    names += ["cudaGraphLaunch_v10000"] * 2 + ["cudaStreamIsCapturing"] * 2 + ["cudaStreamGetCaptureInfo_v3"] * 2
    names += ["cudaEventQuery"] * 6
    found = figures([*map(runtime, names), event("cpu_op", "cudaLaunchKernel", 0.0, 1.0)], steps=2, wall_ms=8.0)
    counted = {name: count for name, count in found["calls"].items() if count}
    assert counted == {"launches": 3.0, "graph_launches": 1.0, "capture_queries": 2.0, "event_queries": 3.0}
    assert found["api_calls"]["cudaLaunchKernel"] == 2.0
    assert found["api_calls"]["cudaGraphLaunch"] == 1.0
    assert sum(found["api_calls"].values()) * 2 == len(names)


def test_the_host_waits_in_synchronizations_and_in_long_copies_only():
    events = [
        event("cuda_runtime", "cudaStreamSynchronize", 0.0, 3000.0),
        event("cuda_runtime", "cudaMemcpyAsync", 5000.0, 1000.0),
        event("cuda_runtime", "cudaMemcpyAsync", 7000.0, 100.0),
        event("cuda_runtime", "cudaLaunchKernel", 8000.0, 1000.0),
    ]
    found = figures(events, steps=2, wall_ms=20.0)
    assert (found["profiled_ms"], found["waiting_ms"], found["host_ms"]) == (10.0, 2.0, 8.0)


def test_nccl_counts_only_where_nothing_else_runs():
    events = [
        event("kernel", "gemm", 0.0, 2000.0),
        event("gpu_memcpy", "Memcpy DtoD", 3000.0, 1000.0),
        event("gpu_memset", "Memset", 3500.0, 1500.0),
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 1000.0, 5000.0),
    ]
    found = figures(events, steps=1, wall_ms=10.0)
    assert (found["gpu_busy_ms"], found["compute_ms"], found["nccl_alone_ms"]) == (6.0, 4.0, 2.0)


def test_a_collective_is_known_by_its_kernel():
    names = ["ncclDevKernel_AllGather_RING_LL(args)"] * 3 + ["ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(args)"]
    durations = [70.0, 900.0, 80.0, 90.0]
    events = [event("kernel", name, 0.0, took) for name, took in zip(names, durations, strict=True)]
    found = figures([*events, event("kernel", "gemm", 0.0, 1.0)], steps=1, wall_ms=1.0)
    assert found["collectives"] == {
        "AllGather": {"calls": 3.0, "median_us": 80.0},
        "ReduceScatter": {"calls": 1.0, "median_us": 90.0},
    }


def test_the_rest_of_a_step_is_idle():
    events = [event("kernel", "gemm", 0.0, 2000.0), event("kernel", "ncclDevKernel_AllReduce", 5000.0, 1000.0)]
    assert figures(events, steps=1, wall_ms=10.0)["idle_ms"] == 7.0


def test_kernels_are_added_up_by_what_they_do():
    kernels = {
        "nvjet_tst_192x192_64x3": 500.0,
        "cutlass_80_tensorop_bf16_s16816gemm": 700.0,
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": 100.0,
        "void multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<float, BFloat16, 2, 1, 1> >": 30.0,
        "ncclDevKernel_AllGather_RING_LL(args)": 40.0,
        "void layer_norm_kernel": 7.0,
    }
    events = [event("kernel", name, 0.0, took) for name, took in kernels.items()]
    events += [event("gpu_memcpy", "Memcpy DtoD", 0.0, 20.0), event("gpu_memset", "Memset", 0.0, 3.0)]
    assert figures(events * 2, steps=2, wall_ms=10.0)["kinds"] == {
        "collectives": 0.04,
        "matrix products": 1.2,
        "attention": 0.1,
        "copies": 0.05,
        "fills": 0.003,
        "other": 0.007,
    }
