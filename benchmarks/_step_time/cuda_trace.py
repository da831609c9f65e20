"""Sum up the CUDA API calls, GPU time and host waits of a ``torch.profiler`` trace."""

import gzip
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

API = {"cuda_runtime", "cuda_driver"}
GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
# API calls that block the host. Long copies also block, because their memory is not pinned.
WAITING = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cuCtxSynchronize"}
COPY = "cudaMemcpyAsync"
WAITING_COPY_MICROSECONDS = 200.0
VERSION = r"_v\d+$"  # suffix of API functions
COLLECTIVE = r"ncclDevKernel_(AllGather|ReduceScatter|AllReduce|SendRecv)"
# Kinds of kernels; the first match in a name wins.
KINDS = {
    "collectives": r"nccl",
    "matrix products": r"gemm|nvjet|cutlass|cublas|splitk",
    "attention": r"attention|flash|fmha|sdpa",
    "copies": r"copy|memcpy",
    "fills": r"memset|fill",
    "other": r"",
}
# Columns of the table, and patterns of their API functions.
CALLS = {
    "launches": r"cu(da)?LaunchKernel(Ex|ExC|Cooperative)?",
    "graph_launches": r"cu(da)?GraphLaunch",
    "copies": r"cudaMemcpy(Async)?|cudaMemset(Async)?",
    "stream_waits": r"cudaStreamWaitEvent",
    "event_records": r"cudaEventRecord(WithFlags)?",
    "event_queries": r"cudaEventQuery",
    "capture_queries": r"cudaStreamIsCapturing|cudaStreamGetCaptureInfo",
    "synchronizations": r"cuda(Stream|Event|Device)Synchronize",
}

Interval = tuple[float, float]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events with a duration in a Chrome trace; ``.gz`` files are decompressed."""
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def figures(events: Iterable[dict[str, Any]], *, steps: int, wall_ms: float) -> dict[str, Any]:
    """Return times and counts per step, averaged over the steps of a trace.

    Args:
        events: Chrome trace events of ``steps`` steps, with ``ts`` and ``dur`` in microseconds.
        steps: Number of steps.
        wall_ms: Duration of all steps in milliseconds.

    Returns:
        - ``profiled_ms``: time of a step.
        - ``host_ms``: time in which the host works.
        - ``waiting_ms``: time in which the host waits for the GPU.
        - ``gpu_busy_ms``, ``idle_ms``: time with and without GPU work.
        - ``compute_ms``: busy time with kernels other than NCCL's.
        - ``nccl_alone_ms``: busy time with NCCL kernels only.
        - ``kinds``: kernel time in milliseconds by kind (``KINDS``).
        - ``calls``: number of API calls by group (``CALLS``).
        - ``api_calls``: number of calls by API function.
        - ``collectives``: ``calls`` and ``median_us`` by collective, including waits for other ranks.
        - ``kernels``: ``calls`` and total ``us`` by kernel, including copies and fills.
    """
    api: Counter[str] = Counter()
    waiting_calls: list[Interval] = []
    compute: list[Interval] = []
    nccl: list[Interval] = []
    collectives: dict[str, list[float]] = {}
    kernels: dict[str, list[float]] = {}
    for event in events:
        category, name = event.get("cat"), event["name"]
        interval = (event["ts"], event["ts"] + event["dur"])
        if category in API:
            api[re.sub(VERSION, "", name)] += 1
            if waits(event):
                waiting_calls.append(interval)
        elif category in GPU:
            kernels.setdefault(name, []).append(event["dur"])
            (nccl if is_collective(event) else compute).append(interval)
            if found := re.search(COLLECTIVE, name):
                collectives.setdefault(found[1], []).append(event["dur"])
    busy, computing, waiting = (covered(each) / 1000 / steps for each in (compute + nccl, compute, waiting_calls))
    profiled = wall_ms / steps
    return {
        "profiled_ms": round(profiled, 3),
        "host_ms": round(profiled - waiting, 3),
        "waiting_ms": round(waiting, 3),
        "gpu_busy_ms": round(busy, 3),
        "compute_ms": round(computing, 3),
        "nccl_alone_ms": round(busy - computing, 3),
        "idle_ms": round(profiled - busy, 3),
        "kinds": _by_kind(kernels, steps),
        "calls": {what: _per_step(api, pattern, steps) for what, pattern in CALLS.items()},
        "api_calls": {name: round(count / steps, 2) for name, count in api.most_common()},
        "collectives": {
            name: {"calls": round(len(each) / steps, 2), "median_us": round(statistics.median(each), 1)}
            for name, each in collectives.items()
        },
        "kernels": {
            name: {"calls": round(len(each) / steps, 2), "us": round(sum(each) / steps, 2)}
            for name, each in sorted(kernels.items(), key=lambda item: -sum(item[1]))
        },
    }


def _by_kind(kernels: Mapping[str, Iterable[float]], steps: int) -> dict[str, float]:
    """Return the milliseconds per step by kind, given the durations of each kernel's calls in microseconds."""
    sums = dict.fromkeys(KINDS, 0.0)
    for name, durations in kernels.items():
        kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
        sums[kind] += sum(durations) / 1000 / steps
    return {kind: round(took, 3) for kind, took in sums.items()}


def is_collective(event: Mapping[str, Any]) -> bool:
    """Return whether a GPU event is an NCCL kernel."""
    return event["cat"] == "kernel" and re.search(KINDS["collectives"], event["name"], re.IGNORECASE) is not None


def waits(event: Mapping[str, Any]) -> bool:
    """Return whether the host waits for the GPU in this API call."""
    name = re.sub(VERSION, "", event["name"])
    return name in WAITING or (name == COPY and event["dur"] >= WAITING_COPY_MICROSECONDS)


def covered(intervals: Iterable[Interval]) -> float:
    """Return the total length of the union of ``intervals``."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _per_step(api: Counter[str], pattern: str, steps: int) -> float:
    return round(sum(count for name, count in api.items() if re.fullmatch(pattern, name)) / steps, 2)
