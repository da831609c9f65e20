"""Hides TransformerEngine: its kernels read device memory, and without a GPU its import may fail."""

import sys

from .patches import Entries, patch


def install() -> None:
    """Let ``import transformer_engine`` raise ImportError, as where it is not installed; one imported already stays."""
    if "transformer_engine" not in sys.modules:
        patch(Entries(sys.modules, "sys.modules"), "transformer_engine", None, "its kernels run on GPUs only")
