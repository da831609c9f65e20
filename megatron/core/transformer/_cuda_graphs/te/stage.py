"""Describe a pipeline stage to capture: its model chunks and their layers."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.utils import log_on_each_pipeline_stage

from ..flags.options import Options
from .layers import fsdp_of, language_model_of, single_run_layers

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

Layers = list[torch.nn.Module]


@dataclass(frozen=True)
class Role:
    """The kind of model that a helper captures.

    Attributes:
        language: Whether this is the language model, which is present on every pipeline stage. Only its helper
            zeroes gradients and captures evaluation. Only its layers receive rotary embeddings.
        model_of: Returns the model that has the layers, or None, given a wrapped chunk.
        wrap: Wraps the engine's callable of a layer; the layer calls the result to replay.
    """

    language: bool = True
    model_of: Callable[[torch.nn.Module], Any] = language_model_of
    wrap: Callable[[Any], Any] = lambda graph: graph


@dataclass(frozen=True)
class Chunk:
    """A model chunk and its layers.

    Attributes:
        module: The wrapped chunk.
        model: The unwrapped model that has the layers, or None.
        layers: The layers that can be captured.
    """

    module: Any
    model: Any
    layers: Layers

    @property
    def every_layer(self) -> Layers:
        """All layers of the model that run exactly once per micro-batch, in execution order."""
        return single_run_layers(self.model)

    @property
    def fsdp(self) -> Any:
        """The ``MegatronFSDP`` among the wrappers, or None."""
        return fsdp_of(self.module)


@dataclass(frozen=True)
class Stage:
    """A pipeline stage that one helper captures.

    Attributes:
        config: The model's ``TransformerConfig``.
        p2p_communicator: Megatron's communicator of this stage.
        role: The kind of model that the helper captures.
    """

    config: Any
    groups: ProcessGroupCollection
    p2p_communicator: Any
    chunks: Sequence[Chunk]
    role: Role

    @property
    def layers(self) -> Layers:
        """The graphable layers of all chunks."""
        return [layer for chunk in self.chunks for layer in chunk.layers]

    @property
    def one_graph_serves_all(self) -> bool:
        """Whether at most one micro-batch is in flight at a time, so that all micro-batches can share one graph."""
        return self.groups.pp.size() == 1 and not self.config.overlap_moe_expert_parallel_comm

    @property
    def may_skip_replays(self) -> bool:
        """Whether passes may run eagerly between replays."""
        return self.one_graph_serves_all and not Options(self.config).updates_state

    @property
    def may_change_shape(self) -> bool:
        """Whether eager passes between replays may have a different shape than at capture."""
        # The eager part after the graph reads the shapes of the last pass from the token dispatcher.
        dispatches = {CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess} & {*self.config.cuda_graph_modules}
        return self.may_skip_replays and not dispatches

    def log(self, level: int, message: str) -> None:
        """Log ``message`` on one rank of each pipeline stage."""
        log_on_each_pipeline_stage(
            logger=logger,
            tp_group=self.groups.tp,
            dp_cp_group=self.groups.dp_cp,
            level=level,
            msg=f"Rank {torch.distributed.get_rank()}: {message}",
        )
