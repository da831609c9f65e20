"""Skip compilation of the C++ dataset helpers if they can already be imported."""

import importlib
from typing import TYPE_CHECKING, Any

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def compile_helpers() -> None:
    """Compile the C++ dataset helpers if they cannot be imported; call this in one process only.

    megatron-core always runs ``make`` and exits if that fails, but its wheels ship the compiled helpers without a
    Makefile.

    Raises:
        SystemExit: The helpers are missing and megatron-core could not compile them.
    """
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        _upstream.compile_helpers()
