"""Exceptions. Some derive from AssertionError, because callers may catch megatron-core's assertions."""


class OptionsError(ValueError, AssertionError):
    """An option is incompatible with CUDA graphs."""


class CallOrderError(RuntimeError, AssertionError):
    """A method was called out of order."""


class ArgumentError(ValueError, AssertionError):
    """An argument differs from capture, or is not supported by a graph."""


class ArgumentTypeError(TypeError, AssertionError):
    """An argument has a type that graphs do not support."""


class UnsupportedError(RuntimeError, AssertionError):
    """A feature that CUDA graphs do not support is in use, for example a hook or an RNG tracker."""


class CaptureFailedError(RuntimeError):
    """A CUDA graph capture failed on this rank or a different one; every participating rank raises it."""


class CaptureInterruptedError(RuntimeError):
    """A capture was interrupted on a different rank, for example by Ctrl-C; no fallback catches it."""


class ChangedSinceCaptureError(RuntimeError):
    """State that CUDA graphs depend on changed since capture."""
