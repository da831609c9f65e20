"""Test overlapped shared experts if the graph ends after their first stage, ``pre_forward_comm``."""

from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")

import torch

from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.moe import shared_experts
from megatron.core.transformer.moe.shared_experts import FusedSharedExpertMLP, SharedExpertMLP, SharedExpertState
from tests.support.ranks.on_cpu_backend import on_cpu_backend


@pytest.fixture(autouse=True, scope="module")
def _cpu_backend():
    with on_cpu_backend():
        yield


@pytest.fixture(params=[SharedExpertMLP, FusedSharedExpertMLP], ids=lambda kind: kind.__name__)
def experts(request, monkeypatch):
    """Return a shared-experts module without layers, configured for graphs of the router and preprocessing."""
    monkeypatch.setattr(shared_experts, "copy_to_tensor_model_parallel_region", lambda input, group: input * 1)
    made = request.param.__new__(request.param)
    torch.nn.Module.__init__(made)
    made.config = SimpleNamespace(
        moe_shared_expert_overlap=True,
        sequence_parallel=False,
        cuda_graph_impl="transformer_engine",
        cuda_graph_modules=[CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess],
    )
    made.use_shared_expert_gate = False
    made.tp_group = None
    made.stream = torch.cuda.Stream()
    made.cached_fc1_input = None
    made._overlap_state = SharedExpertState.IDLE
    return made


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr(shared_experts, "is_graph_capturing", lambda: True)


def begin(experts):
    experts.pre_forward_comm(torch.ones(2, requires_grad=True))


def test_eager_steps_enforce_their_order(experts):
    begin(experts)
    assert experts._overlap_state is SharedExpertState.PRE_FORWARD_COMM_DONE
    with pytest.raises(AssertionError, match="must be called from IDLE"):
        begin(experts)


def test_capture_can_follow_another(experts, capturing):
    for _ in range(2):
        begin(experts)
        assert experts._overlap_state is SharedExpertState.IDLE
        assert experts.cached_fc1_input is not None


@pytest.mark.parametrize(
    "config",
    [{"cuda_graph_modules": [CudaGraphModule.moe]}, {"cuda_graph_modules": []}],
    ids=["moe", "whole layer"],
)
def test_longer_capture_enforces_the_order(experts, capturing, config):
    vars(experts.config).update(config)
    begin(experts)
    assert experts._overlap_state is SharedExpertState.PRE_FORWARD_COMM_DONE


def test_capture_joins_the_experts_stream(experts, capturing, monkeypatch):
    joined = []
    current = torch.cuda.current_stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(type(current), "wait_stream", lambda stream, other: joined.append((stream, other)))
    begin(experts)
    assert joined[-1] == (current, experts.stream)
