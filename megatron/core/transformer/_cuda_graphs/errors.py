"""Errors that are assertions too: megatron-core asserts in the same places, and callers may expect AssertionError."""


class OptionsError(ValueError, AssertionError):
    """Options or environment variables that do not allow CUDA graphs."""


class CallOrderError(RuntimeError, AssertionError):
    """A call at a moment at which it is not allowed."""
