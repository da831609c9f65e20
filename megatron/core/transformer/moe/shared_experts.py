"""Shared experts that overlap token dispatch even if a CUDA graph ends before the dispatch."""

from typing import TYPE_CHECKING, Any

import torch

from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.enums import CudaGraphModule
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


class SharedExpertMLP(_upstream.SharedExpertMLP):
    """Extends megatron-core's ``SharedExpertMLP`` to continue after a replay of its first stage.

    With ``--moe-shared-expert-overlap``, the forward pass consists of stages around the dispatcher's collectives, and
    megatron-core enforces their order. The first stage, ``pre_forward_comm``, is part of the ``moe_preprocess`` graph.
    During capture, no other stage runs. A replay sets ``cached_fc1_input``, the result of ``pre_forward_comm``.
    """

    @property
    def cached_fc1_input(self) -> torch.Tensor | None:
        """The result of ``pre_forward_comm``, ``[sequence, micro-batch, hidden]``; None after the next stage."""
        return self.__dict__.get("_cached_fc1_input")

    @cached_fc1_input.setter
    def cached_fc1_input(self, value: torch.Tensor | None) -> None:
        self.__dict__["_cached_fc1_input"] = value
        if value is not None:
            self._overlap_state = _upstream.SharedExpertState.PRE_FORWARD_COMM_DONE

    def pre_forward_comm(self, input: torch.Tensor, wait_current_stream: bool = True) -> None:
        """Gather the input ``[sequence, micro-batch, hidden]`` on the shared experts' stream.

        Args:
            input: The layer's normalized hidden states, any float dtype.
            wait_current_stream: Whether to wait for the current stream first.
        """
        super().pre_forward_comm(input, wait_current_stream)
        if is_graph_capturing() and self._graph_ends_here():
            torch.cuda.current_stream().wait_stream(self.stream)  # a capture must end with all its streams joined
            self._overlap_state = _upstream.SharedExpertState.IDLE

    def _graph_ends_here(self) -> bool:
        config = self.config
        modules = config.cuda_graph_modules
        return config.cuda_graph_impl == "transformer_engine" and CudaGraphModule.moe_preprocess in modules


class FusedSharedExpertMLP(SharedExpertMLP, _upstream.FusedSharedExpertMLP):
    """Extends megatron-core's ``FusedSharedExpertMLP`` to continue after a replay of its first stage."""
