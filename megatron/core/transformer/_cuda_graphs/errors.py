"""Errors that are also AssertionErrors: megatron-core asserts in these places, and its callers may catch that."""


class OptionsError(ValueError, AssertionError):
    """An option rules out CUDA graphs."""


class CallOrderError(RuntimeError, AssertionError):
    """A method was called out of order."""


class ArgumentError(ValueError, AssertionError):
    """An argument that differs from capture, or that a graph cannot be given."""


class ArgumentTypeError(TypeError, AssertionError):
    """An argument of a type that a graph cannot be given."""


class NoGraphError(RuntimeError, AssertionError):
    """A call that no captured graph is for."""


class UnsupportedError(RuntimeError, AssertionError):
    """Something that CUDA graphs do not work with, such as a hook or an RNG tracker."""


class CaptureFailedError(RuntimeError):
    """A capture of CUDA graphs failed, on this rank or on another; every rank that took part raises it."""


class CaptureInterruptedError(RuntimeError):
    """A capture was interrupted on another rank, by Ctrl-C for example; no fallback catches it."""


class ChangedSinceCaptureError(RuntimeError):
    """Something that CUDA graphs rely on is not what it was at capture."""
