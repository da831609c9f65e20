"""A layer's graph of the forward pass in evaluation: what ``layer.evaluation_graph`` holds."""

import logging
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from megatron.core.utils import log_single_rank

from .dispatcher_state import DispatcherState
from .engine.addresses import AddressGuard, MovedBufferError
from .expected_inputs import ExpectedInputs
from .layer_graph import LayerGraph

logger = logging.getLogger(__name__)


class EvaluationGraph(LayerGraph):
    """Replays the forward graph of one layer in evaluation. A deep copy is None: a copied layer runs eagerly.

    What it returns are new tensors, as of an eager layer.

    Args:
        name: The layer's name in errors and in the log.
        graphed: The engine's callable, captured in evaluation mode.
        sample_args: Its static positional inputs: the hidden states.
        sample_kwargs: Its static keyword inputs, tensors.
        in_place: Knows where the graph reads parameters and buffers.
        dispatcher: What the capture has set in the layer's token dispatcher, which a replay sets again.
    """

    def __init__(
        self,
        name: str,
        graphed: Any,
        sample_args: tuple[torch.Tensor],
        sample_kwargs: dict[str, torch.Tensor],
        in_place: AddressGuard,
        dispatcher: DispatcherState,
        **options: Any,
    ):
        super().__init__(f"{name} in evaluation", graphed, sample_args, sample_kwargs, keeps_values=True, **options)
        self._inputs = ExpectedInputs(name, (*sample_args, *sample_kwargs.values()), str)
        self._in_place, self._dispatcher = in_place, dispatcher
        self._warned = False

    def accepts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a replay computes what the layer would in this call, with its parameters gathered."""
        if self._conditions is not None and self._conditions.have_changed():
            if news := self._conditions.news():
                logger.warning(f"{self.name} runs eagerly: {news}")
            return False
        given = dict(kwargs)
        inputs = list(args) if args else [given.pop("hidden_states", None)]
        for name, static, absent in self._keywords:
            value = given.pop(name, None)
            inputs.append(self._given.get(static, absent) if value is None else value)
        others = (name for name, value in given.items() if value is not None)
        if self._inputs.accepts(inputs) and self._ignored.issuperset(others):
            return self._nothing_moved()
        shape = getattr(inputs[0], "shape", self._shape)
        if shape is not None and shape != self._shape:
            self._warn_of_shape(shape)
        return False

    def _nothing_moved(self) -> bool:
        try:
            self._in_place.check()
        except MovedBufferError as moved:
            if not self._warned:
                self._warned = True
                log_single_rank(logger, logging.WARNING, f"{self.name} runs eagerly: {moved}")
            return False
        return True

    def replay(self, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> Any:
        """Replay on ``args`` and ``kwargs``, which must fit, and return copies of the outputs."""
        self._dispatcher.restore()
        # Nobody says which micro-batch this is where the model is called without a schedule, and weights that training
        # has quantized are those of before the optimizer's step.
        kwargs["is_first_microbatch"] = True
        return tree_map_only(torch.Tensor, torch.clone, super().replay(args, kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None
