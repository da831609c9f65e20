"""Turns torch.compile off: a compiled region hides its operators from the tape."""

import os
import sys

from .patches import patch


class _Environment:
    """``os.environ`` entries as attributes, so that they are noted like every other replaced name."""

    def __getattr__(self, name: str) -> str:
        try:
            return os.environ[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: str) -> None:
        os.environ[name] = value

    def __delattr__(self, name: str) -> None:
        del os.environ[name]


def install() -> None:
    """Turn dynamo off here and in child processes."""
    if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        patch(_Environment(), "TORCHDYNAMO_DISABLE", "1", "compiled code hides its operators")
    if "torch._dynamo.config" in sys.modules:
        patch(sys.modules["torch._dynamo.config"], "disable", True, "compiled code hides its operators")
