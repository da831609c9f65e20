"""Test that gradients on the legacy default stream are rejected, and workspaces belong to the capture stream."""

from unittest import mock

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.graph import capture_stream, make_workspaces
from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables

pytestmark = pytest.mark.usefixtures("cpu_backend")


class _OnLegacyStream(torch.autograd.Function):
    """Makes the legacy default stream current in backward, like an AccumulateGrad node created on it."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        torch.cuda.set_stream(torch.cuda.default_stream())
        return grad


def on_legacy_stream(weight, x):
    return x @ _OnLegacyStream.apply(weight)


def leaf(*shape, requires_grad=True):
    return torch.ones(*shape, device="cuda", requires_grad=requires_grad)


@pytest.mark.parametrize(("weight", "x"), [(False, True), (True, False)], ids=["of an input", "of a parameter"])
def test_gradient_on_legacy_stream_is_refused(weight, x):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(leaf(3, 3), requires_grad=weight)

        def forward(self, x):
            return on_legacy_stream(self.weight, x) if weight else on_legacy_stream(x, self.weight.t())

    captures = []
    with (
        mock.patch.object(torch.cuda.CUDAGraph, "capture_begin", lambda *args, **kwargs: captures.append(args)),
        pytest.raises(RuntimeError, match=r"callable 0 \(Layer\) cannot be captured.*under torch.cuda.stream"),
    ):
        make_graphed_callables(Layer(), (leaf(3, 3, requires_grad=x),))
    assert captures == []


def test_workspaces_are_made_for_forward_and_backward(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: asked.append(torch.cuda.current_stream()))
    with capture_stream() as stream, torch.no_grad():
        make_workspaces()
    assert asked == [stream] * 2
