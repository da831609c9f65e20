"""The autograd nodes: which pass of a runner comes next."""

import pytest
import torch

from megatron.core.transformer.cuda_graphs import (
    _GraphStatus,
    create_cudagraphs,
)

from .local_graph_cases import (
    batch,
    record,
    runners,
    stack,
)

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class TestSecondDerivatives:
    @pytest.mark.parametrize("steps", [0, 1], ids=["while a step is recorded", "in a replay"])
    def test_are_refused_by_the_name_of_their_flag(self, steps):
        model, x = stack(count=1), batch(0).requires_grad_()
        for _ in range(steps):
            model(x).sum().backward()
            create_cudagraphs()
        with pytest.raises(RuntimeError, match=r"layer 1 \(Layer\): create_graph=True"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)


class TestStatus:
    def test_changes_with_each_pass(self):
        model = stack(count=1)
        (runner,) = (record(model), runners(model))[1]
        assert runner.status is _GraphStatus.FWD_READY
        loss = model(batch(1)).sum()
        assert runner.status is _GraphStatus.BWD_READY
        loss.backward()
        assert runner.status is _GraphStatus.FWD_READY

    def test_a_second_forward_pass_needs_a_second_runner(self):
        model = stack(count=1)
        record(model)
        model(batch(1))
        with pytest.raises(RuntimeError, match="it waits for its backward pass"):
            model(batch(1))

    def test_a_second_backward_pass_is_refused(self):
        model = stack(count=1)
        record(model)
        loss = model(batch(1)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="a backward pass, but its forward pass comes next"):
            loss.backward()

    def test_at_the_end_of_a_step_no_runner_is_busy(self):
        model = stack(count=1)
        record(model)
        model(batch(1))
        create_cudagraphs()
        model(batch(1))

    def test_a_forward_pass_that_was_recorded_without_backward_has_no_backward_graph(self):
        model = stack(count=1)
        model(batch(0))
        create_cudagraphs()
        (runner,) = runners(model)
        assert runner.fwd_graph is not None
        assert runner.bwd_graph is None
        with pytest.raises(RuntimeError, match="it was recorded without a backward pass"):
            model(batch(1))
