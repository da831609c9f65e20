"""What the CPU backend refuses, in the words CUDA uses where it has words for it."""

import torch

NOT_PERMITTED = "operation not permitted when stream is capturing"
INVALIDATED = "operation failed due to a previous error during capture"
IMPLICIT = "operation would make the legacy stream depend on a capturing blocking stream"
ISOLATION = "dependency created on uncaptured work in another stream"
CAPTURED_EVENT = "operation not permitted on an event last recorded in a capturing stream"
UNJOINED = "capturing stream has unjoined work"


class CaptureError(torch.AcceleratorError):
    """An operation that a CUDA stream capture forbids. The capture it happened in is void."""


class StaleAddress(RuntimeError):
    """A replay would touch memory that was freed, resized or moved since capture."""


def cuda_error(message: str, detail: str = "") -> CaptureError:
    """Return the error CUDA would report as ``message``; ``detail`` says what caused it here."""
    return CaptureError(f"CUDA error: {message}" + (f" ({detail})" if detail else ""))
