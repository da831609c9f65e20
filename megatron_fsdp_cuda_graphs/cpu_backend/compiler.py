"""Turns off what the tape cannot record: torch.compile and TransformerEngine."""

import os
import sys

from .patches import Entries, patch


def install() -> None:
    """Turn dynamo off, here and in child processes, and let ``import transformer_engine`` raise ImportError.

    A TransformerEngine that is imported already stays; without a GPU its import may fail.
    """
    if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        patch(Entries(os.environ, "os.environ"), "TORCHDYNAMO_DISABLE", "1", "compiled code hides its operators")
    if "torch._dynamo.config" in sys.modules:
        patch(sys.modules["torch._dynamo.config"], "disable", True, "compiled code hides its operators")
    if "transformer_engine" not in sys.modules:
        patch(Entries(sys.modules, "sys.modules"), "transformer_engine", None, "its kernels run on GPUs only")
