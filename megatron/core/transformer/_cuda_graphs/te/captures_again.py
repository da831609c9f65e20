"""What a helper does between steps: graphs that the coming step or the last ones do not fit are captured again."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.utils import log_single_rank

from ..eager_passes import EagerPasses
from ..flags.own import CAPTURES_FLAG, max_captures
from .changed_shapes import STEPS, ChangedShapes
from .graph_use import CAPTURES_USED_UP

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


class CapturesAgain:
    """The part of ``TECudaGraphHelper`` that captures for other shapes, or another number of micro-batches."""

    model: Sequence[torch.nn.Module]
    config: Any
    seq_length: int
    micro_batch_size: int
    tp_group: torch.distributed.ProcessGroup
    dp_cp_group: torch.distributed.ProcessGroup
    _capture_finished: bool
    _graphs_created: bool
    _one_graph_serves_all: Callable[[], bool]
    _captured_tokens: int
    _fits_shapes = True  # captures for other shapes, too
    _may_stay_eager = False  # whether what is to be captured runs eagerly until then, and may go on so
    _recaptures = 0  # for changed steps
    _stays_eager: str
    _eager_passes: EagerPasses
    _captured_microbatches: int | None = None  # of the steps that graphs are for; None for any number
    _changed_shapes: ChangedShapes | None = None  # None if they are kept for all shapes

    def create_cudagraphs(self) -> None:
        """Capture."""
        raise NotImplementedError

    def delete_cuda_graphs(self) -> None:
        """Free the graphs."""
        raise NotImplementedError

    def cuda_graph_set_manual_hooks(self) -> None:
        """Let layers under ``DistributedDataParallel`` gather parameters before a replay."""
        raise NotImplementedError

    def _fit_coming_step(self) -> None:
        """Capture again, or delete the graphs, if the coming step or the last ones do not fit them."""
        if self._captured_microbatches is not None:
            if get_num_microbatches() != self._captured_microbatches:
                self._change_microbatches(get_num_microbatches())
        elif self._changed_shapes is not None:
            shape = self._changed_shapes.before_step(get_num_microbatches())
            if shape is not None:
                tokens, self.micro_batch_size = shape
                self.seq_length = tokens * self.seq_length // self._captured_tokens
                self._may_stay_eager = True
                try:
                    self._capture_again(
                        f"sequences of {self.seq_length} tokens, {self.micro_batch_size} in a micro-batch"
                    )
                finally:
                    self._may_stay_eager = False

    def _change_microbatches(self, microbatches: int) -> None:
        if self._captures_left():
            self._capture_again(f"steps of {microbatches} micro-batches, not {self._captured_microbatches}")
        else:
            log_single_rank(
                logger,
                logging.WARNING,
                f"steps of {microbatches} micro-batches, and all that follow, run eagerly{self._no_capture_left()}",
            )
            if self._graphs_created:
                self.delete_cuda_graphs()
            self._captured_microbatches = None
            self._capture_finished = True  # or the caller would capture
            self._stays_eager = CAPTURES_USED_UP

    def _captures_left(self) -> bool:
        return self._recaptures + 1 < max_captures(self.config)

    def _no_capture_left(self) -> str:
        return f", as graphs have been captured as often as {CAPTURES_FLAG} {max_captures(self.config)} allows"

    def _capture_again(self, steps: str) -> None:
        """Capture for changed ``steps``, between two of them, in place of the graphs that there are."""
        log_single_rank(logger, logging.INFO, f"CUDA graphs are captured again, for {steps}")
        self._recaptures += 1
        with ExitStack() as stack:
            gathering = [chunk for chunk in self.model if getattr(chunk, "remove_forward_pre_hook_handles", None)]
            for chunk in gathering:  # DistributedDataParallel with --overlap-param-gather
                chunk.disable_forward_pre_hook(param_sync=False)
                stack.callback(chunk.enable_forward_pre_hook)
            if self._graphs_created:
                self.delete_cuda_graphs()
            self._capture_finished = False  # a stage without layers has no graphs, and captures with the others
            self.create_cudagraphs()
        if gathering and self._graphs_created:
            self.cuda_graph_set_manual_hooks()

    def _outlook(self) -> str:
        """What passes of other shapes are told to expect."""
        if not self._fits_shapes:
            return ""
        if not self._captures_left():
            return self._no_capture_left()
        return f", until all steps have had one shape, {STEPS} or more: then graphs are captured for it"

    def _may_skip_replays(self) -> bool:
        """Whether a pass between replays may run eagerly: not where these hand on state that replays then lack."""
        config = self.config
        stateful = (config.fp8, config.fp4, config.delay_wgrad_compute, config.fine_grained_activation_offloading)
        return self._one_graph_serves_all() and not any(stateful)

    def _may_change_shape(self) -> bool:
        """Whether such a pass may have another shape, too."""
        # The token dispatcher keeps the shapes of its last pass, which the part after the graph reads.
        dispatches = {CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess} & {*self.config.cuda_graph_modules}
        return self._may_skip_replays() and not dispatches

    def _watch_eager_passes(self, tokens: int, calls: int) -> EagerPasses:
        """Return what counts passes of other shapes than that of the graphs that are about to be attached.

        Args:
            tokens: Tokens of a sequence in that shape, on this rank.
            calls: How often it is told of one micro-batch.
        """
        self._captured_tokens = tokens
        self._eager_passes = passes = EagerPasses(self._outlook())
        if self._fits_shapes and self._captures_left():
            groups = (self.tp_group, self.dp_cp_group)
            self._changed_shapes = ChangedShapes(passes, calls, groups, get_num_microbatches())
        return passes
