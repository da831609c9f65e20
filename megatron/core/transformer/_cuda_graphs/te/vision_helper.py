"""``VisionTECudaGraphHelper``: captures the layers of a vision encoder in CUDA graphs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron.core.process_groups_config import ProcessGroupCollection

from ..layer_graph import LayerGraph
from .helper import TECudaGraphHelper, logger
from .layers import decoder_layers, vision_model_of
from .order import PassOrder
from .sample_inputs import LayerInputs, SampleArguments


def get_vision_cuda_graph_seq_length(vision_config: Any, default_seq_length: int = 4096) -> int:
    """Return for how many vision tokens graphs are captured.

    Args:
        vision_config: The vision encoder's configuration. If it has them, these decide, in this order:
            ``max_vision_cuda_graph_seq_length``, tokens, unless None or 0; ``num_position_embeddings``, patches, of
            which each square of ``spatial_merge_size`` (by default 1) patches a side makes one token.
        default_seq_length: Tokens where it has neither.
    """
    longest = getattr(vision_config, "max_vision_cuda_graph_seq_length", None)
    if longest:
        return longest
    patches = getattr(vision_config, "num_position_embeddings", None)
    if patches is None:
        return default_seq_length
    return patches // getattr(vision_config, "spatial_merge_size", 1) ** 2


class VisionTECudaGraphHelper(TECudaGraphHelper):
    """Captures graphs of the layers in ``vision_model.decoder.layers`` and attaches them to the layers.

    It goes beside the ``TECudaGraphHelper`` of the language model and captures before that one does, which zeroes
    gradients and metrics after capture: this one does not. It meets no other rank of the pipeline, so it may be called
    on ranks with a vision model only; elsewhere it captures nothing.

    Inputs are ``[vision_seq_length, 1, hidden]``: all images of a micro-batch, one after the other. There are no
    rotary embeddings among them.

    Args:
        model: The model's chunks, wrapped as for training; the first with a ``vision_model`` counts.
        vision_config: The vision encoder's ``TransformerConfig``, with ``cuda_graph_impl="transformer_engine"``.
        vision_seq_length: Vision tokens in a micro-batch; see ``get_vision_cuda_graph_seq_length``.
        micro_batch_size: Not needed: the batch dimension is 1.
        num_microbatches: Micro-batches that sample arguments are made for. Capture sets it: 1 without pipeline
            parallelism, where one graph serves all, and with it what the num_microbatches calculator says.
        pg_collection: The process groups; by default those of ``parallel_state``.

    Raises:
        OptionsError, ValueError, RuntimeError: as ``TECudaGraphHelper``.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        vision_config: Any,
        vision_seq_length: int,
        micro_batch_size: int,
        num_microbatches: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        with_vision = [chunk for chunk in model if vision_model_of(chunk) is not None] or list(model)
        super().__init__(with_vision[:1], vision_config, vision_seq_length, 1, pg_collection=pg_collection)
        self.num_microbatches = num_microbatches
        self._interleaved = len(model) > 1

    def _discover_layers(self) -> None:
        super()._discover_layers()
        # What else callers of megatron-core's helper read.
        self.vision_model = vision_model_of(self.model[0]) if self.model else None
        if self.vision_model is None:
            logger.warning("VisionTECudaGraphHelper: the model has no vision_model, nothing will be captured")
        self.callables, self.num_layers = self.flattened_callables, len(self.flattened_callables)

    def _layers_of(self, chunk: torch.nn.Module) -> tuple[torch.nn.Module | None, list[tuple[torch.nn.Module, bool]]]:
        vision_model = vision_model_of(chunk)
        return vision_model, [(layer, False) for layer in decoder_layers(vision_model)]

    def _samples(self, order: Sequence[float], chunk_id_list: list | None = None) -> list[SampleArguments]:
        """Make inputs for every layer and micro-batch, whatever the order."""
        inputs = LayerInputs(self.config, self.seq_length, self.micro_batch_size)
        return [
            inputs.make(layer, None) for _ in range(self.num_microbatches or 1) for layer in self.flattened_callables
        ]

    def _order(self) -> PassOrder:
        passes = super()._order()
        # Between virtual stages more micro-batches of this chunk are in flight than if it were the only one: keep all.
        return replace(passes, order=sorted(passes.order, reverse=True)) if self._interleaved else passes

    def _capture_layers(self) -> None:
        super()._capture_layers()
        for layer in self.flattened_callables:
            layer.cuda_graphs = [_wrap_graph_for_vision(graph) for graph in layer.cuda_graphs]

    def _reset_after_capture(self) -> None:
        """Zero nothing: the language model's helper does, on all ranks."""

    def cuda_graph_set_manual_hooks(self) -> None:
        """Do nothing: vision encoders do not gather their parameters by hooks of ``DistributedDataParallel``."""


def _wrap_graph_for_vision(graph_fn: Callable[..., Any]) -> Any:
    """Return ``graph_fn`` without the None outputs that a layer without context returns beside its hidden states.

    Args:
        graph_fn: Any callable. A ``LayerGraph`` gives a ``LayerGraph``, as which its layer replays it; of another one
            all attributes, such as ``reset`` and ``backward_dw``, are there.
    """
    if isinstance(graph_fn, LayerGraph):
        return graph_fn.wrapped(_WithoutNone)
    return _WithoutNone(graph_fn)


class _WithoutNone:
    """A callable whose tuples come without None, unless they hold nothing else; in all else the callable itself."""

    def __init__(self, graphed: Callable[..., Any]):
        self.graphed = graphed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.graphed(*args, **kwargs)
        if not isinstance(output, tuple):
            return output
        return tuple(item for item in output if item is not None) or output

    def __getattr__(self, name: str) -> Any:
        if name == "graphed":  # while it is copied
            raise AttributeError(name)
        return getattr(self.graphed, name)
