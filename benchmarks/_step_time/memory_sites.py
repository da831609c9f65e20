"""What the allocator's memory is used for: by pool and stream, and by the line that allocated it."""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

# Of a block's frames, those that say what it is for.
OWN = re.compile(
    r".*?/((?:megatron|megatron_fsdp_cuda_graphs|transformer_engine|flash_attn|examples|benchmarks|torch/optim|torch/cuda)/.*)"
)
FRAMES = 3
EAGER = (0, 0)
Snapshot = Sequence[Mapping[str, Any]]


def record() -> None:
    """Note from now on which line allocates what, and when."""
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", clear_history=True)


def stop() -> None:
    """Note it no more."""
    torch.cuda.memory._record_memory_history(None)


def summary(segments: Snapshot, most: int = 40) -> dict[str, Any]:
    """Return what ``segments`` of ``torch.cuda.memory_snapshot`` hold, in MiB.

    Args:
        segments: The snapshot.
        most: How many lines to list.

    Returns:
        ``pools``: for graphs and for eager work, by stream, ``reserved``, ``used`` by tensors, and ``segments``, their
        number; ``sites``: for both, by the lines that allocated it, what is used; ``gaps``: what tensors keep from
        being given back to the device, by the lines that allocated those in the same segment, the largest first.
    """
    streams = {stream: place for place, stream in enumerate(sorted({each["stream"] for each in segments}))}
    pools: defaultdict[str, Counter[str]] = defaultdict(Counter)
    sites: defaultdict[str, Counter[str]] = defaultdict(Counter)
    gaps = Counter[str]()
    for segment in segments:
        pool = "eager" if tuple(segment["segment_pool_id"]) == EAGER else "graphs"
        found = pools[f"{pool}, stream {streams[segment['stream']]}"]
        found["segments"] += 1
        found["reserved"] += segment["total_size"]
        own = Counter[str]()
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                own[_site(block.get("frames", ()))] += block["size"]
        found["used"] += own.total()
        sites[pool].update(own)
        if own and pool == "eager":
            gaps[" and ".join(own)] += segment["total_size"] - own.total()
    return {
        "pools": {
            name: {what: n if what == "segments" else _mib(n) for what, n in found.items()}
            for name, found in sorted(pools.items())
        },
        "sites": {pool: {site: _mib(n) for site, n in found.most_common(most)} for pool, found in sites.items()},
        "gaps": {sites: _mib(n) for sites, n in gaps.most_common(10)},
    }


def history() -> tuple[Snapshot, Sequence[Mapping[str, Any]]]:
    """Return the allocator's segments, and what it did since ``record``."""
    found = torch.cuda.memory._snapshot()
    return found["segments"], found["device_traces"][torch.cuda.current_device()]


def peaks(segments: Snapshot, trace: Iterable[Mapping[str, Any]], most: int = 25) -> dict[str, Any]:
    """Return what tensors used at the moment when they used most, of graphs' memory and of the other, in MiB.

    What was allocated before the trace begins is not in it.

    Args:
        segments: The snapshot, which has all segments of graphs that there are.
        trace: What the allocator did, in the order of time.
        most: How many lines to list.
    """
    owned = sorted(
        (each["address"], each["address"] + each["total_size"])
        for each in segments
        if tuple(each["segment_pool_id"]) != EAGER
    )
    starts = [start for start, _ in owned]
    live: dict[str, dict[int, tuple[int, str]]] = {"graphs": {}, "eager": {}}
    used, top, then = Counter[str](), Counter[str](), dict[str, list[tuple[int, str]]]()
    for event in trace:
        if event["action"] not in ("alloc", "free_completed"):
            continue
        place = bisect_right(starts, event["addr"]) - 1
        pool = "graphs" if place >= 0 and event["addr"] < owned[place][1] else "eager"
        if event["action"] == "alloc":
            live[pool][event["addr"]] = event["size"], _site(event.get("frames", ()))
            used[pool] += event["size"]
            if used[pool] > top[pool]:
                top[pool], then[pool] = used[pool], []
        elif event["addr"] in live[pool]:
            if top[pool] == used[pool] and not then[pool]:  # the first that is freed after the most were used
                then[pool] = list(live[pool].values())
            used[pool] -= live[pool].pop(event["addr"])[0]
    found = {}
    for pool in top:
        sites = Counter[str]()
        for size, site in then[pool] or live[pool].values():
            sites[site] += size
        listed = {site: _mib(size) for site, size in sites.most_common(most)}
        found[pool] = {"used": _mib(top[pool]), "sites": listed}
    return found


def _site(frames: Iterable[Mapping[str, Any]]) -> str:
    own = ((OWN.fullmatch(frame["filename"]), frame) for frame in frames)
    named = [f"{match[1]}:{frame['line']} {frame['name']}" for match, frame in own if match]
    return " < ".join(named[:FRAMES]) or "not known"


def _mib(size: int) -> float:
    return round(size / 2**20, 1)
