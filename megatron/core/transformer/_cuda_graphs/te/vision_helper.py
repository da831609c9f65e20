"""``VisionTECudaGraphHelper``: captures the layers of a vision encoder in CUDA graphs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron.core.process_groups_config import ProcessGroupCollection

from .helper import TECudaGraphHelper, logger
from .layers import vision_model_of
from .order import PassOrder
from .stage import Role


def get_vision_cuda_graph_seq_length(vision_config: Any, default_seq_length: int = 4096) -> int:
    """Return the number of vision tokens for which graphs are captured.

    Args:
        vision_config: The vision encoder's configuration. The first of these attributes that it has is used:
            ``max_vision_cuda_graph_seq_length``, in tokens, unless None or 0; ``num_position_embeddings``, in patches,
            of which ``spatial_merge_size ** 2`` (by default 1) make one token.
        default_seq_length: The number of tokens if it has neither.
    """
    longest = getattr(vision_config, "max_vision_cuda_graph_seq_length", None)
    if longest:
        return longest
    patches = getattr(vision_config, "num_position_embeddings", None)
    if patches is None:
        return default_seq_length
    return patches // getattr(vision_config, "spatial_merge_size", 1) ** 2


def _wrap_graph_for_vision(graph_fn: Callable[..., Any]) -> Any:
    """Return ``graph_fn`` without the None outputs that a layer without context returns beside its hidden states.

    Args:
        graph_fn: Any callable. The result has its attributes, such as ``reset`` and ``backward_dw``.
    """
    return _WithoutNone(graph_fn)


class _WithoutNone:
    """Removes None from tuples that a callable returns, unless nothing else is in them; has its attributes."""

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


class VisionTECudaGraphHelper(TECudaGraphHelper):
    """Captures graphs of the layers in ``vision_model.decoder.layers`` and attaches them to the layers.

    Use it beside the language model's ``TECudaGraphHelper``, and capture with this one first: only the other one zeroes
    gradients and metrics after capture. It does not communicate with other pipeline stages, so it may be called only on
    ranks with a vision model; on others it captures nothing. Under pipeline parallelism call both helpers'
    ``before_step`` before each step: where the number of micro-batches changes, each captures again.

    Inputs are ``[vision_seq_length, 1, hidden]``: all images of a micro-batch, one after the other. There are no rotary
    embeddings among them.

    Args:
        model: The model's chunks, wrapped as for training; the first with a ``vision_model`` is used.
        vision_config: The vision encoder's ``TransformerConfig``, with ``cuda_graph_impl="transformer_engine"``.
        vision_seq_length: Vision tokens in a micro-batch; see ``get_vision_cuda_graph_seq_length``.
        micro_batch_size: Not used: the batch dimension is 1.
        num_microbatches: Micro-batches that sample arguments are made for. Capture sets it: to 1 without pipeline
            parallelism, where one graph serves all, otherwise to that of the num_microbatches calculator.
        pg_collection: The process groups; by default those of ``parallel_state``.

    Raises:
        OptionsError, ValueError, RuntimeError: as ``TECudaGraphHelper``.
    """

    _role = Role(language=False, model_of=vision_model_of, report="capture_vision", wrap=_wrap_graph_for_vision)

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
        """Set the attributes of ``TECudaGraphHelper._discover_layers`` for the vision encoder, and three more.

        Attributes:
            vision_model: The vision model, or None.
            callables, num_layers: Its layers to capture, and their number.
        """
        super()._discover_layers()
        self.vision_model = vision_model_of(self.model[0]) if self.model else None
        if self.vision_model is None:
            logger.warning("VisionTECudaGraphHelper: the model has no vision_model, nothing will be captured")
        self.callables, self.num_layers = self.flattened_callables, len(self.flattened_callables)

    def _order(self) -> PassOrder:
        passes = super()._order()
        # With virtual stages more micro-batches of this chunk are in flight than if it were the only one: keep all.
        return replace(passes, order=sorted(passes.order, reverse=True)) if self._interleaved else passes

    def _get_sample_arguments(
        self, order: Sequence[float], chunk_id_list: list | None = None
    ) -> tuple[list[tuple[torch.Tensor, ...]], list[dict[str, torch.Tensor]]]:
        """Make inputs for every layer and micro-batch, whatever the order."""
        arguments, layers = self._arguments(), [layer for own in self._state.layers_apart for layer in own]
        samples = [arguments.inputs_of(layer, None) for _ in range(self.num_microbatches or 1) for layer in layers]
        return [args for args, _ in samples], [kwargs for _, kwargs in samples]

    def _reset_after_capture(self) -> None:
        """Do nothing: the language model's helper zeroes gradients and metrics, on all ranks."""

    def cuda_graph_set_manual_hooks(self) -> None:
        """Do nothing: hooks of ``DistributedDataParallel`` do not gather the parameters of vision encoders."""
