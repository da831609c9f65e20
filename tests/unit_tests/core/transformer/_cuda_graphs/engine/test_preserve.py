"""preserve: what warm-up and capture change is put back."""

from contextlib import suppress

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.graph import hide_grads_and_hooks, preserve_buffers

pytestmark = pytest.mark.usefixtures("cpu_backend")


class Failure(Exception):
    """Raised in place of an engine's."""


class _Buffer(torch.nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("buffer", buffer)


def test_buffers_that_are_expanded_are_left_alone():
    module = _Buffer(torch.ones(1, device="cuda").expand(4))
    with preserve_buffers([module]):
        pass
    assert module.buffer.tolist() == [1] * 4


def test_a_buffer_that_did_not_change_serves_a_backward_pass_that_saved_it():
    module = _Buffer(torch.full((4,), 3.0, device="cuda"))
    x = torch.ones(4, device="cuda", requires_grad=True)
    y = x * module.buffer
    with preserve_buffers([module]):
        pass
    y.sum().backward()
    assert x.grad.tolist() == [3] * 4


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_are_bare_meanwhile_and_then_as_they_were(fails):
    param = torch.nn.Parameter(torch.ones(2))
    called: list[torch.Tensor] = []
    param.register_hook(called.append)
    grad = torch.full((2,), 5.0)
    param.grad = grad
    with suppress(Failure), hide_grads_and_hooks([param]):
        assert param.grad is None
        (param * 2).sum().backward()
        assert torch.equal(torch.tensor([2.0, 2.0]), param.grad)
        assert called == []
        if fails:
            raise Failure
    assert param.grad is grad
    (param * 2).sum().backward()
    assert len(called) == 1
    assert torch.equal(grad, torch.tensor([7.0, 7.0]))
