"""Layers that torch's FSDP2 shards (``--use-torch-fsdp2``), in graphs.

FSDP2 gathers the parameters of a layer in hooks around its passes, and frees their memory after each. A graph reads
them at one address, so this memory is kept for layers with graphs: they are gathered before each pass as ever, to the
same place. Replays run through the layer's own call, with FSDP2's hooks around them, and backward graphs give gradients
to the gathered parameters, from which FSDP2 reduces them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


class KeptParameters:
    """Those parameters of layers that FSDP2 shards.

    Args:
        chunks: The model's chunks.
        layers: The layers, within the chunks; FSDP2 may shard them with other modules, or not at all.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module], layers: Sequence[torch.nn.Module]):
        self._params: dict[Any, list[Any]] = {}  # FSDP2's own objects, by the module that is gathered with them
        for chunk in chunks:
            sharded = [module for module in chunk.modules() if isinstance(module, FSDPModule)]
            if sharded:
                # Before the first step no module is the root yet, and the first to run would be.
                sharded[0]._get_fsdp_state()._lazy_init()
                inside = {module for layer in layers for module in layer.modules()}
                for module in sharded:
                    self._add(module, inside)

    def _add(self, module: Any, inside: set[torch.nn.Module]) -> None:
        group = module._get_fsdp_state()._fsdp_param_group
        params = [] if group is None else [param for param in group.fsdp_params if param._module_info.module in inside]
        if params:
            self._params[module] = params

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The context of a capture, in which they are gathered; from then on their memory is kept.

        At the end they are sharded again. After an exception their memory is not kept.
        """
        try:
            for module, params in self._params.items():
                self._gather(module)
                for param in params:
                    param.free_unsharded_param = _keep
            yield
        except BaseException:
            self.release()
            raise
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


def _keep() -> None:
    """Do nothing, in the place of ``free_unsharded_param``."""
