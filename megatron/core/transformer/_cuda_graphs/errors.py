"""Errors that are also AssertionErrors: megatron-core asserts in these places, and its callers may catch that."""


class OptionsError(ValueError, AssertionError):
    """An option or environment variable rules out CUDA graphs."""


class CallOrderError(RuntimeError, AssertionError):
    """A method was called out of order."""
