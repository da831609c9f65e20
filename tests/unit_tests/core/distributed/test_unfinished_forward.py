"""Test that training continues unaffected after an exception in a forward pass."""

from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch

from tests.support.trainings import training as support

from .captured_training import captured, graphed, in_use
from .fsdp_variants import Variant, run_backward


class Interruption(Exception):
    """Raised by a failing forward pass."""


@contextmanager
def eager(case):
    """Yield a model without graphs that has run one step."""
    model = Variant(case).build()
    run_backward(model, case)
    yield model.module


@contextmanager
def with_graphs(case):
    with captured(case) as training:
        yield training.fsdp


def interrupted_forward(fsdp, case, layer, grad=True):
    """Run a forward pass that fails in a forward-pre hook of ``layer``."""
    handle = fsdp.module.decoder.layers[layer].register_forward_pre_hook(mock.Mock(side_effect=Interruption))
    batch = next(support._batches(case, 0))
    with nullcontext() if grad else torch.no_grad(), pytest.raises(Interruption):
        fsdp(batch.tokens, batch.positions, batch.mask)
    handle.remove()


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("built", [eager, with_graphs])
def test_next_pass_finds_the_double_buffer_free(ranks, built, layer):
    case = graphed("layer")
    with built(case) as fsdp:
        for grad in (True, False):
            interrupted_forward(fsdp, case, layer, grad)
            assert in_use(fsdp)[0]
            fsdp.zero_grad_buffer()
            run_backward(fsdp, case)
            assert in_use(fsdp)[0] == {}
