"""Work of every step that runs as a CUDA graph once it has been the same for some steps."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from megatron.core.transformer._cuda_graphs.engine.graph import Capture, pause_gc

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

EAGER_STEPS = 2  # before a capture: allocators and communicators are set up, and addresses have settled
CAPTURES = 3  # after so many, work whose addresses change is left alone


class RepeatedWork:
    """Work on memory that stays where it is from step to step.

    Attributes:
        replays: How often its last graph was replayed.
    """

    def __init__(self, name: str):
        self._name = name
        self._key: list[Any] | None = None
        self._steps = self._captures = self.replays = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: torch.Tensor | None = None

    def run(self, key: list[Any], work: Callable[[], Any]) -> Any:
        """Run ``work`` on the current stream, and return what it returns: a tensor of its own, if it is a tensor.

        Args:
            key: What the graph is good for: addresses, and numbers that ``work`` computes with on the host.
            work: Enqueues the work, the same for equal keys, and does nothing else that has to be done each time: a
                replay does not call it. If it cannot be captured it runs eagerly, now and later.
        """
        if key != self._key:
            if self._graph is not None and self._captures == CAPTURES:
                logger.warning(f"{self._name} runs without a CUDA graph: its memory has moved {CAPTURES} times")
            self.reset()
            self._key, self._steps = key, 0
        if self._graph is None:
            self._steps += 1
            if self._steps <= EAGER_STEPS or self._captures == CAPTURES or not self._capture(work):
                return work()
        assert self._graph is not None and self._result is not None
        self._graph.replay()
        self.replays += 1
        return self._result.clone()

    def _capture(self, work: Callable[[], Any]) -> bool:
        """Record the graph; return whether there is one."""
        self._captures += 1
        against, result = "", None
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        try:
            capture = Capture(None, draws=False)
            with pause_gc(), torch.cuda.stream(stream):
                graph = capture.new_graph()
                with capture.recording(graph):
                    result = work()
        except Exception as error:
            against = f"{type(error).__name__}: {error}"
        if not against and not isinstance(result, torch.Tensor):
            against = f"it returns {type(result).__name__}, not a tensor"
        if against:
            self._captures = CAPTURES
            logger.warning(f"{self._name} runs without a CUDA graph: {against}")
            return False
        current.wait_stream(stream)
        self._graph, self._result = graph, result
        return True

    def reset(self) -> None:
        """Free the graph: before the communicators are, that it has collectives of."""
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._result = self._key = None
        self.replays = 0
