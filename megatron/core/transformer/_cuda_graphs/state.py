"""Process-wide capture and warm-up flags, read throughout megatron-core."""

import os

from packaging.version import Version

from megatron.core.utils import get_torch_version

_IS_GRAPH_CAPTURING = False
_IS_GRAPH_WARMUP = False

# Before this version, torch collects garbage at the start of every capture.
FREEZE_GC_MAX_TORCH_VERSION = Version("2.9.0a0")
# Whether to freeze live objects (gc.freeze) during capture, which makes these collections fast.
# CUDA_GRAPH_CAPTURE_FREEZE_GC=0 in the environment disables it.
FREEZE_GC: bool = os.getenv("CUDA_GRAPH_CAPTURE_FREEZE_GC") != "0" and (
    get_torch_version() < FREEZE_GC_MAX_TORCH_VERSION
)


def is_graph_capturing() -> bool:
    """Return whether CUDA graphs are being captured."""
    return _IS_GRAPH_CAPTURING


def _set_capture_start() -> None:
    """Enter capture mode, in which hooks skip gradient reduction and parameter gathering."""
    global _IS_GRAPH_CAPTURING
    _IS_GRAPH_CAPTURING = True


def _set_capture_end() -> None:
    """Leave capture mode."""
    global _IS_GRAPH_CAPTURING
    _IS_GRAPH_CAPTURING = False


def is_graph_warmup() -> bool:
    """Return whether modules are being warmed up for a capture."""
    return _IS_GRAPH_WARMUP


def _set_warmup_start() -> None:
    """Enter warm-up mode, in which activation checkpointing does not recompute."""
    global _IS_GRAPH_WARMUP
    _IS_GRAPH_WARMUP = True


def _set_warmup_end() -> None:
    """Leave warm-up mode."""
    global _IS_GRAPH_WARMUP
    _IS_GRAPH_WARMUP = False
