"""Turns the backend on for this process."""

from __future__ import annotations

import os
import sys

import torch

from .patches import APPLIED


def installed() -> bool:
    """Whether this process runs on the CPU backend."""
    return bool(APPLIED)


def install() -> None:
    """Let ``torch.cuda`` work on CPU tensors from here on, in this process. A second call changes nothing.

    Call it before megatron is imported. A megatron that is imported already gets the replaced functions wherever it
    holds torch's by a name of its own at module level.

    Raises:
        RuntimeError: a GPU is visible.
    """
    if installed():
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            "a GPU is visible, and the CPU backend would hide it from this process. Set CUDA_VISIBLE_DEVICES='' to "
            "run on the CPU backend, or run without it."
        )
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo.config" in sys.modules:
        sys.modules["torch._dynamo.config"].disable = True  # type: ignore[attr-defined]

    # the parts patch torch as they are imported by the calls below, never before the check above
    from . import cuda_graph, device, device_names, distributed, generators, streams

    for part in (device, streams, generators, device_names, cuda_graph, distributed):
        part.install()
    _rebind_early_names()


def _rebind_early_names() -> None:
    """Give modules of megatron that were imported before ``install`` the replaced functions and classes."""
    replaced = {id(p.original): getattr(p.owner, p.name) for p in APPLIED if callable(p.original)}
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.split(".")[0] != "megatron":
            continue
        for name, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])
