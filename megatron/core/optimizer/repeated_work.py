"""Replay GPU work that is the same in every step, for example gradient clipping."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from megatron.core.transformer._cuda_graphs.engine.graph import Capture, capture_stream, pause_gc

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

EAGER_STEPS = 2  # before a capture: allocators and communicators initialize, and addresses settle
CAPTURES = 3  # at most; the work runs eagerly if its inputs change again


class RepeatedWork:
    """Captures GPU work after ``EAGER_STEPS`` steps with equal inputs, and replays it while they are unchanged.

    New inputs are captured again. After ``CAPTURES`` captures, or a failed one, the work runs eagerly.

    Attributes:
        replays: Number of replays.
    """

    def __init__(self, name: str):
        self._name = name
        self._key: list[Any] | None = None
        self._steps = self._captures = self.replays = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: torch.Tensor | None = None

    def run(self, key: list[Any], work: Callable[[], Any]) -> Any:
        """Run ``work`` on the current stream and return its result; a replay returns a copy of the graph's output.

        Args:
            key: Addresses and numbers that the graph bakes in.
            work: Enqueues the same work for equal keys, without other side effects: a replay does not call it.
        """
        if key != self._key:
            if self._graph is not None and self._captures == CAPTURES:
                self._warn(f"recapture limit reached ({CAPTURES} captures)")
            self.reset()
            self._key, self._steps = key, 0
        if self._graph is None:
            self._steps += 1
            if self._captures == CAPTURES or self._steps <= EAGER_STEPS or not self._capture(work):
                return work()
        assert self._graph is not None and self._result is not None
        self._graph.replay()
        self.replays += 1
        return self._result.clone()

    def _capture(self, work: Callable[[], Any]) -> bool:
        """Capture ``work`` and return whether this succeeded. After a failure, nothing is captured again."""
        self._captures += 1
        try:
            capture = Capture(None, draws=False)
            with pause_gc(), capture_stream():
                graph = capture.new_graph()
                with capture.recording(graph):
                    result = work()
            if not isinstance(result, torch.Tensor):
                raise TypeError(f"the captured function must return a tensor, got {type(result).__name__}")
        except Exception as error:
            self._captures = CAPTURES
            self._warn(f"{type(error).__name__}: {error}")
            return False
        self._graph, self._result = graph, result
        return True

    def _warn(self, reason: str) -> None:
        logger.warning(f"{self._name} runs without a CUDA graph: {reason}")

    def reset(self) -> None:
        """Free the graph. Call this before its communicators are destroyed."""
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._result = None
