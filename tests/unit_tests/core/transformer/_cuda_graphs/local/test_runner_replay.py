"""_CudaGraphRunner: what a replay leaves behind, and passes without grad."""

import pytest
import torch

from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

from .local_graph_cases import batch, eager_calls, record, runners, stack

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


def test_after_a_replay_each_parameter_has_the_event_that_its_gradient_waits_for():
    model = stack()
    for param in model.parameters():
        param.main_grad = torch.zeros_like(param)
    record(model)
    model(batch(1)).sum().backward()
    (runner, *_) = runners(model)
    event = runner.bwd_graph_replay_complete_event
    assert {param._cudagraph_wgrad_ready_event for param in model.layers[0].parameters()} == {event}
    delete_cuda_graphs()
    assert not any(hasattr(param, "_cudagraph_wgrad_ready_event") for param in model.parameters())


def test_a_backward_pass_after_its_graphs_were_deleted_says_so():
    model = stack()
    record(model)
    loss = model(batch(1)).sum()
    delete_cuda_graphs()
    with pytest.raises(RuntimeError, match=r"deleted after the forward pass.*between steps"):
        loss.backward()


def test_without_grad_graphs_are_replayed():
    model = stack()
    record(model)
    before = eager_calls(model)
    with torch.no_grad():
        out = model(batch(1))
    assert eager_calls(model) == before
    model.eval()
    assert torch.equal(out, model(batch(1)))
