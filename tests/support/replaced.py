"""Load megatron-core's original of a module that the patch replaces."""

import importlib
from functools import cache
from importlib.util import module_from_spec
from typing import Any

from megatron_fsdp_cuda_graphs.overlay import ordinary_spec


@cache
def replaced(name: str) -> Any:
    """Load and return megatron-core's original module ``name`` next to the patched one."""
    spec = ordinary_spec(name, importlib.import_module(name.rpartition(".")[0]).__path__)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
