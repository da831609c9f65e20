"""What a helper captures: the chunks of a model in one pipeline stage, and their layers."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.utils import log_on_each_pipeline_stage

from .layers import fsdp_of, language_model_of, single_run_layers

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

Layers = list[torch.nn.Module]


@dataclass(frozen=True)
class Role:
    """What a helper does beside others of the same training.

    Attributes:
        language: Whether it is that of the language model, which each pipeline stage has. Only that one logs steps,
            zeroes gradients, captures for evaluation and again for other shapes; only its layers get rotary embeddings.
        model_of: Returns the model with the layers inside the wrappers of a chunk, or None.
        report: What the files of its report are called.
        wrap: Wraps a callable of the engine; replays run the result.
    """

    language: bool = True
    model_of: Callable[[torch.nn.Module], Any] = language_model_of
    report: str = "capture"
    wrap: Callable[[Any], Any] = lambda graph: graph


@dataclass(frozen=True)
class Chunk:
    """A chunk of the model.

    Attributes:
        module: The chunk in its wrappers.
        model: The model in it that has layers; None if it has no such model.
        layers: Its layers that can be captured.
    """

    module: Any
    model: Any
    layers: Layers

    @property
    def every_layer(self) -> Layers:
        """All layers of the model that run once for each micro-batch, in the order in which they run."""
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
        p2p_communicator: Megatron's, of this stage.
        role: What its helper does beside others.
    """

    config: Any
    groups: ProcessGroupCollection
    p2p_communicator: Any
    chunks: Sequence[Chunk]
    role: Role

    @property
    def layers(self) -> Layers:
        """The layers that can be captured, of all chunks."""
        return [layer for chunk in self.chunks for layer in chunk.layers]

    @property
    def one_graph_serves_all(self) -> bool:
        """Whether only one micro-batch is in flight at a time, as without pipeline stages."""
        return self.groups.pp.size() == 1 and not self.config.overlap_moe_expert_parallel_comm

    @property
    def may_skip_replays(self) -> bool:
        """Whether a pass between replays may run eagerly: not where these hand on state that replays then lack."""
        config = self.config
        stateful = (config.fp8, config.fp4, config.delay_wgrad_compute, config.fine_grained_activation_offloading)
        return self.one_graph_serves_all and not any(stateful)

    @property
    def may_change_shape(self) -> bool:
        """Whether such a pass may have another shape, too."""
        # The token dispatcher keeps the shapes of its last pass, which the part after the graph reads.
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
