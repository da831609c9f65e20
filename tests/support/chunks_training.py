"""Trains two chunks of a GPT on one rank, in the order of a pipeline stage that has both: for machines with one GPU."""

from collections import Counter
from typing import Any
from unittest import mock

import torch

from . import models
from .training import Training

# The last of two stages with two chunks each and four micro-batches, moved so that each chunk has what it waits for.
ORDER = (1, 1, 2, 2, -2, 1, -2, 1, -1, 2, -1, 2, -2, -2, -1, -1)
MICROBATCHES = ORDER.count(1)


class ChunksTraining(Training):
    """Two chunks of ``case.layers`` layers each, which hand on hidden states and their gradients without sending."""

    def _wrapped_chunks(self) -> list[torch.nn.Module]:
        assert self.case.microbatches == MICROBATCHES
        assert not self.case.tied
        self.config.deallocate_pipeline_outputs = False
        return [models.under_fsdp(self.case, self.config, self._chunk(first)) for first in (True, False)]

    def _chunk(self, first: bool) -> torch.nn.Module:
        from megatron.core import parallel_state

        with (
            mock.patch.object(parallel_state, "is_pipeline_first_stage", return_value=first),
            mock.patch.object(parallel_state, "is_pipeline_last_stage", return_value=not first),
        ):
            return models.gpt(self.case, self.config)

    def make_helper(self) -> Any:
        from megatron.core.transformer._cuda_graphs.te.capture_arguments import CaptureArguments
        from megatron.core.transformer._cuda_graphs.te.order import PassOrder
        from megatron.core.transformer._cuda_graphs.te.stage import Stage

        def order(arguments: CaptureArguments) -> PassOrder:
            return PassOrder([*ORDER], [len(layers) for layers in arguments.layers], MICROBATCHES)

        self.patches.enter_context(mock.patch.object(Stage, "one_graph_serves_all", False))
        self.patches.enter_context(mock.patch.object(CaptureArguments, "order", order))
        return super().make_helper()

    def _run_passes(self, step: int, forward_only: bool = False) -> list[dict[str, torch.Tensor]]:
        from megatron.core.pipeline_parallel.schedules import backward_step, forward_step

        batches = [[*self._batches(step)] for _ in self.chunks]
        losses: list[dict[str, torch.Tensor]] = []
        received: dict[tuple[int, int], Any] = {}  # inputs of chunks, and gradients of their outputs
        outputs: dict[tuple[int, int], Any] = {}
        done: Counter[int] = Counter()
        for turn in ORDER:
            chunk, number = abs(turn), done[turn]
            done[turn] += 1
            if turn > 0:
                given = received.get((1, number)) if chunk == 2 else None
                output, _ = forward_step(
                    self._forward_step,
                    iter(batches[chunk - 1][number : number + 1]),
                    self.chunks[chunk - 1],
                    MICROBATCHES,
                    given,
                    losses,
                    self.config,
                    1,
                    is_first_microbatch=number == 0,
                    current_microbatch=number,
                    is_last_stage=chunk == 2,
                )
                outputs[chunk, number] = output
                if chunk == 1:  # as if it were received; on the only rank every model returns fp32
                    hidden_states = output.detach().to(self.case.torch_dtype, copy=True)
                    received[1, number] = hidden_states.requires_grad_(not forward_only)
            elif not forward_only:
                given = received.get((1, number)) if chunk == 2 else None
                output = outputs.pop((chunk, number))
                gradient = received[2, number].to(output.dtype) if chunk == 1 else None
                received[2, number] = backward_step(given, output, gradient, self.config)
        if not forward_only:
            self.config.finalize_model_grads_func(self.chunks, None)
        return losses
