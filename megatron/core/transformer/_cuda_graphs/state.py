"""Whether CUDA graphs are being captured or warmed up for: one state of the process, for all of megatron-core."""

import os

import torch

_IS_GRAPH_CAPTURING = False
_IS_GRAPH_WARMUP = False

# Whether what is alive is kept from the garbage collector during captures by TransformerEngine's engine: torch before
# 2.9 collects garbage at the beginning of every capture. CUDA_GRAPH_CAPTURE_FREEZE_GC=0 forbids it.
FREEZE_GC: bool = os.getenv("CUDA_GRAPH_CAPTURE_FREEZE_GC") != "0" and torch.__version__ < "2.9.0a0"


def is_graph_capturing() -> bool:
    """Whether CUDA graphs are being captured."""
    return _IS_GRAPH_CAPTURING


def _set_capture_start() -> None:
    """Say that captures begin: hooks that reduce gradients or gather parameters stand back, for instance."""
    global _IS_GRAPH_CAPTURING
    _IS_GRAPH_CAPTURING = True


def _set_capture_end() -> None:
    """Say that captures are over."""
    global _IS_GRAPH_CAPTURING
    _IS_GRAPH_CAPTURING = False


def is_graph_warmup() -> bool:
    """Whether modules run to warm up for a capture."""
    return _IS_GRAPH_WARMUP


def _set_warmup_start() -> None:
    """Say that warm-up begins: activation checkpointing, for instance, computes nothing again until its end."""
    global _IS_GRAPH_WARMUP
    _IS_GRAPH_WARMUP = True


def _set_warmup_end() -> None:
    """Say that warm-up is over."""
    global _IS_GRAPH_WARMUP
    _IS_GRAPH_WARMUP = False
