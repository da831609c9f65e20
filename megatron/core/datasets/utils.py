"""Dataset helpers that are not compiled again if they can be imported."""

import importlib
from typing import TYPE_CHECKING, Any

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def compile_helpers() -> None:
    """Compile the C++ dataset helper if it cannot be imported; call this in one process.

    megatron-core always runs ``make`` and exits if that fails, but its wheels hold the compiled helper and no Makefile.

    Raises:
        SystemExit: the helper is missing and megatron-core could not compile it.
    """
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        _upstream.compile_helpers()
