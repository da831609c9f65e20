"""Graphs for inference: their keys, their capture at the first call, and their static inputs."""

from collections.abc import Hashable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..engine.preserve import preserve_tensors
from ..engine.slot import WarmupRecord
from .arguments import tensors_of, with_tensors
from .capture import capture_mode
from .session import CaptureSession


class InferenceGraphs:
    """State shared by the graphs for inference, each of which is captured at its first call.

    Attributes:
        session: The session of these graphs, which may be replayed in any order.
        outputs: The addresses of their outputs.
    """

    def __init__(self) -> None:
        self.session = CaptureSession()
        self.outputs: set[int] = set()
        self._inputs = WeakTensorKeyDictionary()

    def capture(self, runner: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Capture the forward graph of ``runner`` for a call with these arguments."""
        runner.begin_capture(self.session, WarmupRecord())
        given = tensors_of(args, {name: kwargs[name] for name in runner.call.kwargs})
        try:
            with capture_mode():
                with preserve_tensors(_states_of(kwargs.get("inference_context"), runner.base_module)):
                    runner.call.warm_up([tensor.detach().clone() for tensor in given], runner.num_warmup_steps)
                values, named = with_tensors((args, kwargs), map(self._input_for, given))
                runner.create_fwd_graph(values, named, clone_inputs=False)
        except BaseException:
            runner.reset()
            raise
        runner.finish()
        self.outputs |= {output.data_ptr() for output in runner.fwd_graph_output_surface if output.numel()}

    def _input_for(self, given: torch.Tensor) -> torch.Tensor:
        """Return the static tensor for the input ``given``: the output of another graph, or one of its own.

        Graphs that are captured with the same tensor share its static tensor: every replay copies its inputs first. A
        graph that was captured on another's output, and is replayed on another tensor, overwrites that output.
        """
        if given.data_ptr() in self.outputs:
            return given.detach()
        static = self._inputs.get(given)
        if static is None or (static.shape, static.stride()) != (given.shape, given.stride()):
            with torch.inference_mode(False):
                static = torch.empty_like(given, requires_grad=False).copy_(given)
            self._inputs[given] = static
        return static


def _states_of(context: Any, module: Any) -> tuple[torch.Tensor, ...]:
    """Return the states of ``module`` in a static-batching context: Mamba's advance in every call.

    Those of all layers if ``module`` has no layer number, or no states under it.
    """
    states = getattr(context, "key_value_memory_dict", {})
    number = getattr(module, "layer_number", None)
    return tensors_of((states[number],) if number in states else tuple(states.values()))


def key_of(context: Any, args: tuple, kwargs: dict[str, Any]) -> Hashable:
    """The key of the graph for a call with an inference context."""
    if context.is_static_batching():
        first = kwargs["hidden_states"] if "hidden_states" in kwargs else tensors_of(args, kwargs)[0]
        return tuple(first.shape), context.is_decode_only()
    return context.padded_batch_dimensions
