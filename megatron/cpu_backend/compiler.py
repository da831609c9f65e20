"""Turns torch.compile off: a compiled region hides its operators from the tape."""

import os
import sys

from .patches import Entries, patch


def install() -> None:
    """Turn dynamo off here and in child processes."""
    if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        patch(Entries(os.environ, "os.environ"), "TORCHDYNAMO_DISABLE", "1", "compiled code hides its operators")
    if "torch._dynamo.config" in sys.modules:
        patch(sys.modules["torch._dynamo.config"], "disable", True, "compiled code hides its operators")
