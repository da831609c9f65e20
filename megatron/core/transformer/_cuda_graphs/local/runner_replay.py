"""Replay: a runner's graphs, with autograd, in the recorded order of passes."""

from typing import Any

import torch

from ..engine.replay import ReplayOptions
from ..errors import CallOrderError
from .arguments import tensors_of, with_tensors
from .nodes import LocalReplay, _GraphStatus, replay_runner
from .runner_matching import RunnerMatching


class RunnerReplay(RunnerMatching):
    """Replays the graphs, and keeps track of which pass comes next."""

    def replay_graph_capture(self, is_first_microbatch: bool, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """Replay the forward graph on arguments like those at capture, with autograd.

        Returns:
            What ``func`` returned at capture, in a tuple if it was none.

        Raises:
            ArgumentError: arguments do not match; says which, and how.
            RuntimeError: a replay is not possible now; see ``_CudagraphReplayNode``.
        """
        self.refuse_mismatch(args, kwargs)
        return self.replay(is_first_microbatch, args, kwargs)

    def replay(self, is_first_microbatch: bool, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """``replay_graph_capture`` on arguments that were compared already."""
        if self.turn.bit:  # inference does without gradient buffers
            self._session.check_parameters()
            self._session.check_conditions(self)
        return self.replay_checked(is_first_microbatch, args, kwargs)

    def replay_checked(self, is_first_microbatch: bool, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """``replay`` where the parameters were compared too."""
        inputs = tensors_of(args, {name: kwargs[name] for name in self.fwd_graph_input_kwarg_metas})
        outputs = replay_runner(self, is_first_microbatch, *inputs, *self.params_to_backprop)
        # Nothing says when what no graph reads was read, and later replays write there. With grad that is so from the
        # backward pass on: what leaves the layers may be kept for longer, as a loss is for the log.
        if self.is_last_layer or not torch.is_grad_enabled():
            outputs = tuple(each.clone() if i in self._unread_outputs else each for i, each in enumerate(outputs))
        if any(output.requires_grad for output in outputs):
            self.status = _GraphStatus.BWD_READY
            self._session.turns.begin(self.turn)
        output = with_tensors(self._returned, iter(outputs))
        return output if isinstance(output, tuple) else (output,)

    @property
    def returns_tuple(self) -> bool:
        """Whether ``func`` itself returns a tuple."""
        return isinstance(self._returned, tuple)

    def begin_forward(self) -> LocalReplay:
        """Make ready for a replay of the forward graph and return what replays it.

        Raises:
            RuntimeError: there is no graph, the backward pass comes next, or the replay would overwrite what other
                runners wait for.
        """
        if self._replay is None:
            raise CallOrderError(f"{self.name} has no CUDA graph to replay: it was not captured, or deleted")
        self.expect(_GraphStatus.FWD_READY)
        self._session.turns.check_forward(self.turn)
        return self._replay

    def replay_options(self, is_first_microbatch: bool) -> ReplayOptions | None:
        """What the replay needs besides its inputs."""
        if self._quantized is None:
            return None
        return ReplayOptions(ends_quantization=self._quantized.before_forward(is_first_microbatch))

    def begin_backward(self) -> None:
        """Make ready for a replay of the backward graph.

        Raises:
            RuntimeError: the graphs were deleted after the forward pass, the forward pass comes next, or the replay
                would overwrite what other runners wait for.
        """
        if self._replay is None:
            raise CallOrderError(
                f"{self.name}: its CUDA graphs were deleted after the forward pass, so there is no backward graph. "
                "Call delete_cuda_graphs() between steps."
            )
        self.expect(_GraphStatus.BWD_READY)
        self._session.turns.check_backward(self.turn)

    def end_backward(self) -> None:
        """Note that the backward graph was replayed: weight gradients are complete after this point of the stream."""
        event = self.bwd_graph_replay_complete_event
        event.record()
        for param in self.params_to_backprop:
            param._cudagraph_wgrad_ready_event = event
        self.status = _GraphStatus.FWD_READY
        self._session.turns.end(self.turn)
        self._sharded.end_backward_replay()
