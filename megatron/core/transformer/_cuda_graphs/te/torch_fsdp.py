"""Fixed parameter addresses for graphs of layers sharded by torch's FSDP2 (``--use-torch-fsdp2``).

FSDP2's hooks gather a layer's parameters before each pass and free their memory after it. Graphs read parameters at
fixed addresses, so the memory of captured layers is kept and every gather writes to the same addresses. Replays run
through the layer's own call, so FSDP2's hooks run before and after them. Backward graphs write gradients of the
gathered parameters, which FSDP2 then reduces.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from .stage import Chunk


def kept_parameters(chunks: Sequence[Chunk]) -> dict[torch.nn.Module, "KeptParameters"]:
    """Return a ``KeptParameters`` for each chunk sharded by FSDP2, keyed by the wrapped chunk."""
    found = {}
    for chunk in chunks:
        sharded = [module for module in chunk.module.modules() if isinstance(module, FSDPModule)]
        if sharded and chunk.layers:
            found[chunk.module] = KeptParameters(sharded, chunk.layers)
    return found


class KeptParameters:
    """Keeps the gathered parameters of a chunk's layers in memory.

    Args:
        sharded: The chunk's FSDP2 modules, the root first.
        layers: The layers. FSDP2 may gather their parameters together with parameters of other modules.
    """

    def __init__(self, sharded: Sequence[Any], layers: Sequence[torch.nn.Module]):
        self._params: dict[Any, list[Any]] = {}  # FSDPParam objects, by the module they are gathered with
        # Before the first step there is no root yet, and the first module to run would become the root.
        sharded[0]._get_fsdp_state()._lazy_init()
        inside = {module for layer in layers for module in layer.modules()}
        for module in sharded:
            group = module._get_fsdp_state()._fsdp_param_group
            params = () if group is None else group.fsdp_params
            if own := [param for param in params if param._module_info.module in inside]:
                self._params[module] = own

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context manager for a capture: gathers the parameters, and keeps their memory until ``release``."""
        try:
            for module, params in self._params.items():
                self._gather(module)
                for param in params:
                    param.free_unsharded_param = lambda: None
            yield
        finally:
            for module in self._params:
                module.reshard()

    @staticmethod
    def _gather(module: Any) -> None:
        try:
            module.unshard()
        except BaseException:
            # Otherwise the next pass would use the result of the failed gather.
            module._get_fsdp_state()._fsdp_param_group._all_gather_result = None
            raise

    def release(self) -> None:
        """Let FSDP2 free the memory after each pass again."""
        for module, params in self._params.items():
            for param in params:
                vars(param).pop("free_unsharded_param", None)
                if module._get_fsdp_state()._fsdp_param_group.is_sharded:
                    param.free_unsharded_param()
