"""Train eagerly and with graphs in this process, for bitwise comparison."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.support.trainings.case import Case
from tests.support.trainings.training import Trace, Training

from .fsdp_variants import Variant, run_backward, small

FLAGS = ("--fsdp-double-buffer", "--fsdp-db-use-persist-buf-on-alloc-fail")
WARMED_UP = 10  # number of earlier steps that capture assumes, so that it warms up only once


def graphed(holds: str | None = "model", **changes) -> Case:
    """Return a case with three layers and graphs of scope ``holds`` (None: the default scope)."""
    return small(layers=3, holds=holds, warmup=WARMED_UP, **changes)


class CapturedTraining(Training):
    """A training run with graphs from the second step on, or without graphs."""

    def __init__(self, case: Case, graphs: bool = True, variant: Variant | None = None):
        with (variant or Variant(case)).in_place(upstream=False):
            super().__init__(case, graphs)
        if graphs:
            self.make_helper()
        self.step()
        if graphs:
            self.capture(lambda training: training.helper.create_cudagraphs())
            whole = case.holds != "layer" and not case.modules
            assert not self.helper.graphs_created() or (self.helper.model_graphs is not None) == whole

    @property
    def fsdp(self) -> torch.nn.Module:
        """The model's ``MegatronFSDP`` wrapper."""
        return self.chunks[0].module

    def delete(self) -> None:
        """Free all graphs."""
        if self.helper is not None and self.helper.graphs_created():
            self.helper.delete_cuda_graphs()


class CapturedModel:
    """A model with graphs but no optimizer, for ranks with fake collectives."""

    def __init__(self, case: Case, variant: Variant | None = None):
        from megatron.core import num_microbatches_calculator as calculator
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        MoEAuxLossAutoScaler.main_loss_backward_scale = None  # an earlier optimizer set its shape
        destroy_moe_metrics_tracker()  # the previous model may have had a different number of layers
        model_parallel_cuda_manual_seed(1234, use_cudagraphable_rng=True, force_reset_rng=True)
        calculator.unset_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(0, None, 4, 1, 4)
        self.case = case
        self.model = (variant or Variant(case)).build(graphs=True)
        self.fsdp: torch.nn.Module = self.model.module
        self.layers = list(self.fsdp.module.decoder.layers)
        self.step()
        self.helper = TECudaGraphHelper([self.model], self.model.config, case.sequence, case.micro_batch)
        self.helper.create_cudagraphs()

    def step(self) -> None:
        """Run the forward and backward passes of a step."""
        self.fsdp.zero_grad_buffer()
        run_backward(self.fsdp, self.case)
        self.fsdp.finish_grad_sync()


@contextmanager
def captured(case: Case, variant: Variant | None = None) -> Iterator[CapturedModel]:
    """Yield a model with graphs, and free them at the end."""
    model = CapturedModel(case, variant)
    yield model
    model.helper.delete_cuda_graphs()


def trained(
    case: Case,
    graphs: bool,
    between: Callable[[CapturedTraining], None] = lambda training: None,
    variant: Variant | None = None,
    steps: int = 2,
    kind: type[CapturedTraining] = CapturedTraining,
) -> Trace:
    """Train one step, capture if ``graphs``, train ``steps`` more, and return the trace.

    ``between`` is called before each of the later steps.
    """
    training = kind(case, graphs, variant)
    try:
        for _ in range(steps):
            between(training)
            training.step()
        return training.trace()
    finally:
        training.delete()


def compared(case: Case, between: Callable[[CapturedTraining], None] = lambda training: None, **options: Any) -> Trace:
    """Assert that training with graphs is bit-identical to eager training; return the trace with graphs."""
    eager, graphs = (trained(case, on, between, **options) for on in (False, True))
    assert eager.differences(graphs) == []
    return graphs


def short_batch(training: Training, step: int) -> tuple[torch.Tensor, ...]:
    """Return tokens, positions, mask and labels of a shorter sequence, so that no graph matches."""
    batch = next(training._batches(step))
    half = training.case.sequence // 2
    mask = batch.mask[..., :half, :half].contiguous()
    tokens, positions, labels = (each[:, :half].contiguous() for each in (batch.tokens, batch.positions, batch.labels))
    return tokens, positions, mask, labels


def in_use(fsdp: torch.nn.Module) -> list[dict]:
    """Return the buckets in the double buffers, as a dict for parameters and a dict for gradients."""
    group = next(group for group in fsdp.param_and_grad_buffer.parameter_groups if group.fsdp_unit_id is not None)
    buffers = group.model_weight_buffer, group.main_grad_buffer
    return [dict(buffer.temporary_bucket_allocator.using_buffer) for buffer in buffers]


@contextmanager
def occupied(fsdp: torch.nn.Module, kind: str) -> Iterator[None]:
    """Mark one buffer of the double buffer ``kind`` as occupied while in this context."""
    group = next(group for group in fsdp.param_and_grad_buffer.parameter_groups if group.fsdp_unit_id is not None)
    idle = getattr(group, kind).temporary_bucket_allocator.idle_buffer
    idle.remove((0, 0))
    yield
    idle.append((0, 0))
