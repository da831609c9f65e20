"""Errors. Many are also AssertionErrors: megatron-core asserts in these places, and callers may catch that."""


class OptionsError(ValueError, AssertionError):
    """An option rules out CUDA graphs."""


class CallOrderError(RuntimeError, AssertionError):
    """A method was called out of order."""


class ArgumentError(ValueError, AssertionError):
    """An argument that differs from capture, or that a graph cannot take."""


class ArgumentTypeError(TypeError, AssertionError):
    """An argument of a type that a graph cannot take."""


class NoGraphError(RuntimeError, AssertionError):
    """A call that fits no captured graph."""


class UnsupportedError(RuntimeError, AssertionError):
    """A feature that CUDA graphs do not support, for example a kind of hook or RNG tracker."""


class CaptureFailedError(RuntimeError):
    """A capture of CUDA graphs failed on some rank; all ranks that took part raise this error."""


class CaptureInterruptedError(RuntimeError):
    """A capture was interrupted on another rank, by Ctrl-C for example. No fallback catches this error."""


class ChangedSinceCaptureError(RuntimeError):
    """A CUDA graph cannot replay, because state that it relies on changed since capture."""
