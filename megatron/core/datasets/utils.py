"""Dataset helpers: megatron-core's own, except that a helper which is already compiled is not compiled again."""

import importlib
from typing import TYPE_CHECKING, Any

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream = extend(__name__)

if TYPE_CHECKING:  # names that are megatron-core's own

    def __getattr__(name: str) -> Any: ...


def compile_helpers() -> None:
    """Make the C++ dataset helper importable; invoke it on a single process.

    Wheels of megatron-core carry the compiled helper but not the Makefile that builds it, so megatron-core's own
    function, which always runs ``make``, would end the process although there is nothing to build.

    Raises:
        SystemExit: the helper is missing and megatron-core could not compile it.
    """
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        _upstream.compile_helpers()
