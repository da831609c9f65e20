"""Trainings in this process, eager or with graphs, whose every number can be compared."""

from collections.abc import Callable
from contextlib import contextmanager

import torch

from tests.support.training import Case, Trace, Training

from .fsdp_variants import Variant, small

WARMUP = 1  # steps before capture


def graphed(layers_per_graph: int = 0, **changes) -> Case:
    """A case of three layers; 0 layers in a graph stand for all of them."""
    return small(layers=3, layers_per_graph=layers_per_graph, warmup=WARMUP, **changes)


class CapturedTraining(Training):
    """A training whose layers have graphs from the second step on."""

    def __init__(self, case: Case, graphs: bool = True, variant: Variant | None = None):
        with (variant or Variant(case)).in_place(upstream=False):
            super().__init__(case, graphs)
        if graphs:
            self.make_helper()
        self.step()
        if graphs:
            self.capture(lambda training: training.helper.create_cudagraphs())

    @property
    def fsdp(self) -> torch.nn.Module:
        """The wrapper."""
        return self.chunks[0].module

    def delete(self) -> None:
        """Free the graphs."""
        if self.helper is not None and self.helper.graphs_created():
            self.helper.delete_cuda_graphs()


@contextmanager
def captured(case: Case, variant: Variant | None = None):
    """A training with graphs, which are freed at the end."""
    training = CapturedTraining(case, variant=variant)
    try:
        yield training
    finally:
        training.delete()


def trained(
    case: Case,
    graphs: bool,
    between: Callable[[CapturedTraining], None] = lambda training: None,
    variant: Variant | None = None,
    steps: int = 2,
) -> Trace:
    """Train some steps after the capture, with a call of ``between`` before each."""
    training = CapturedTraining(case, graphs, variant)
    try:
        for _ in range(steps):
            between(training)
            training.step()
        return training.trace()
    finally:
        training.delete()
