"""Recording: a runner runs its function eagerly in the first step, and notes the order of passes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ..engine.quantization import current_quantization
from ..engine.rng import current_rng_state
from .arguments import CudagraphBufferMetadata, described, tensors_of, with_tensors
from .nodes import _CudagraphRecordNode, _GraphStatus
from .record import _CudagraphGlobalRecord
from .runner_state import RunnerState


class RunnerRecording(RunnerState):
    """Runs the function eagerly, and adds its first forward and backward pass to the record."""

    def record_graph_capture(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run eagerly, and record the first call and its backward pass. Returns what ``func`` returns."""
        output = self.func(*args, **kwargs)
        differentiable = [tensor for tensor in tensors_of(output) if tensor.requires_grad] if self.grad_enabled else []
        if differentiable and torch.is_grad_enabled():
            noted = _CudagraphRecordNode.apply(self, *differentiable)
            noted = iter((noted,) if len(differentiable) == 1 else noted)
            output = with_tensors(
                output, iter([next(noted) if tensor.requires_grad else tensor for tensor in tensors_of(output)])
            )
            self.status = _GraphStatus.BWD_READY
        if not self.fwd_graph_recorded:
            self.is_frozen = torch.is_grad_enabled() and not differentiable
            self.apply_cudagraph_record_metadata(args, kwargs, output)
            self._quantization = current_quantization()
            self._rng_state = current_rng_state()
            self._autocast = _autocast_in_force(tensors_of(args, kwargs))
            _CudagraphGlobalRecord.record_fwd_graph(self, described(args), described(kwargs), described(output))
            self.fwd_graph_recorded = True
        return output

    def record_backward(self) -> None:
        """Note a backward pass of the recorded step; the first is recorded.

        Raises:
            RuntimeError: the runner waits for its forward pass.
        """
        self.expect(_GraphStatus.BWD_READY)
        self.status = _GraphStatus.FWD_READY
        if not self.bwd_graph_recorded:
            self.backward_pass = torch._C._current_graph_task_id()
            _CudagraphGlobalRecord.record_bwd_graph(self)
            self.bwd_graph_recorded = True

    def apply_cudagraph_record_metadata(self, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        """Attach ``cg_buffer_metadata`` to all tensors that a recorded call takes or returns."""
        recording = _CudagraphGlobalRecord.recording_session().recording
        with_backward = any(tensor.requires_grad for tensor in tensors_of(outputs))
        for tensor in tensors_of(args, kwargs):
            known = getattr(tensor, "cg_buffer_metadata", None)
            if known is None or known.recording is not recording:
                known = tensor.cg_buffer_metadata = CudagraphBufferMetadata(recording=recording)
            known.is_cudagraph_input = True
            known.is_saved_for_backward |= with_backward
            known.input_use_count += 1
            known.cudagraph_reuse_ref_count += known.is_cudagraph_output
        for tensor in tensors_of(outputs):
            tensor.cg_buffer_metadata = CudagraphBufferMetadata(is_cudagraph_output=True, recording=recording)


def _autocast_in_force(inputs: Sequence[torch.Tensor]) -> Callable[[], AbstractContextManager]:
    """Return what enters torch's autocast again as it is now for the device of ``inputs``."""
    kind = inputs[0].device.type if inputs else "cuda"
    if not torch.is_autocast_enabled(kind):
        return nullcontext
    return partial(torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False)
