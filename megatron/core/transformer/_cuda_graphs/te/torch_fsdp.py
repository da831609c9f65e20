"""Layers that torch's FSDP2 shards (``--use-torch-fsdp2``), in graphs.

FSDP2 gathers the parameters of a layer in hooks around its passes, and frees their memory after each. A graph reads
them at one address, so this memory is kept for layers with graphs: they are still gathered before each pass, to the
same place. Replays run through the layer's own call, with FSDP2's hooks around them, and backward graphs give gradients
to the gathered parameters, from which FSDP2 reduces them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from .stage import Chunk


def kept_parameters(chunks: Sequence[Chunk]) -> dict[torch.nn.Module, "KeptParameters"]:
    """Return for each of the model's ``chunks`` that FSDP2 shards the parameters of its layers."""
    found = {}
    for chunk in chunks:
        sharded = [module for module in chunk.module.modules() if isinstance(module, FSDPModule)]
        if sharded and chunk.layers:
            found[chunk.module] = KeptParameters(sharded, chunk.layers)
    return found


class KeptParameters:
    """Those parameters of layers that FSDP2 shards.

    Args:
        sharded: Its modules that FSDP2 shards, the root first.
        layers: Layers in it; FSDP2 may shard them with other modules.
    """

    def __init__(self, sharded: Sequence[Any], layers: Sequence[torch.nn.Module]):
        self._params: dict[Any, list[Any]] = {}  # FSDP2's own objects, by the module that is gathered with them
        # Before the first step no module is the root yet, and the first to run would be.
        sharded[0]._get_fsdp_state()._lazy_init()
        inside = {module for layer in layers for module in layer.modules()}
        for module in sharded:
            group = module._get_fsdp_state()._fsdp_param_group
            params = () if group is None else group.fsdp_params
            if own := [param for param in params if param._module_info.module in inside]:
                self._params[module] = own

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The context of a capture, in which they are gathered; until ``release`` their memory is kept."""
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
            # Or the next pass would take it for its own.
            module._get_fsdp_state()._fsdp_param_group._all_gather_result = None
            raise

    def release(self) -> None:
        """Let FSDP2 free their memory after each pass again."""
        for module, params in self._params.items():
            for param in params:
                vars(param).pop("free_unsharded_param", None)
                if module._get_fsdp_state()._fsdp_param_group.is_sharded:
                    param.free_unsharded_param()
