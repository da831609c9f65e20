"""Test local graphs of layers with weights sharded across ranks (``--tensor-parallel-num-weight-shards``)."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core.tensor_parallel.generalized_tensor_parallelism")

from megatron.core.tensor_parallel import generalized_tensor_parallelism as gtp
from megatron.core.transformer._cuda_graphs.local.sharded_weights import completed_in_backward
from megatron.core.transformer.cuda_graphs import (
    CudaGraphManager,
    create_cudagraphs,
    delete_cuda_graphs,
    get_gtp_runner_streams,
    is_graph_capturing,
    is_graph_warmup,
)

from . import sharded_cases
from .local_graph_cases import batch, eager_calls, runners
from .sharded_cases import ShardedLayer, sharded_stack, train_sharded

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs", "sharding")


@pytest.fixture
def sharding(monkeypatch):
    """Install megatron-core's sharded weights with stand-ins for TransformerEngine's collectives."""
    sharded_cases.install(monkeypatch)


@pytest.fixture
def both(monkeypatch):
    def run(options=None, **training):
        """Train eagerly and with graphs; return both traces and the graphed model."""
        eager = train_sharded(sharded_stack(graphs=False, **(options or {})), **training)
        assert "nan" not in str(eager)
        sharded_cases.install(monkeypatch)
        model = sharded_stack(**(options or {}))
        return eager, train_sharded(model, **training), model

    return run


class TestTraining:
    def test_training_equals_eager(self, both):
        eager, graphed, model = both(microbatches=2)
        assert graphed == eager
        assert len(runners(model)) == 3
        assert eager_calls(model) == [2 + 2 + 1] * 3  # the recorded step, two warm-up passes, and the capture

    def test_two_microbatches_in_flight_equal_eager(self, both):
        eager, graphed, model = both({"pipeline": 2}, microbatches=2, at_once=2)
        assert graphed == eager
        assert len(runners(model)) == 6

    def test_passes_without_grad_between_steps_equal_eager(self, both):
        def forward(model, step):
            with torch.no_grad():
                found = model(batch(500 + step)).tolist()
            create_cudagraphs()
            return found

        eager, graphed, _ = both(between_steps=forward)
        assert graphed == eager

    def test_training_continues_eagerly_after_failed_capture(self, both, monkeypatch):
        class Failing(ShardedLayer):
            def forward(self, *args, **kwargs):
                out, none = super().forward(*args, **kwargs)
                if is_graph_capturing() and not is_graph_warmup() and self.layer_number == 2:
                    raise RuntimeError("simulated failure")
                return out, none

        eager = train_sharded(sharded_stack(graphs=False))
        sharded_cases.install(monkeypatch)
        failures = iter([True])

        def create():
            with pytest.raises(RuntimeError, match="simulated failure") if next(failures, False) else nullcontext():
                create_cudagraphs()
            assert not gtp._inflight_comm_params
            assert all(layer.first._prefetch_handle is None for layer in model.layers)

        model = sharded_stack(kind=Failing)
        assert train_sharded(model, create=create) == eager
        assert not runners(model)


def test_backward_replay_streams_are_listed():
    assert get_gtp_runner_streams() == []
    model = sharded_stack(count=1)
    train_sharded(model, steps=1)
    assert get_gtp_runner_streams() == []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        train_sharded(model, steps=2)
    assert get_gtp_runner_streams() == [stream]
    delete_cuda_graphs()
    assert get_gtp_runner_streams() == []


def test_gathered_weights_are_in_the_graph_pool():
    sharded_stack(count=1)
    assert gtp._CG_MEMPOOL == CudaGraphManager.global_mempool is not None
    delete_cuda_graphs()
    train_sharded(sharded_stack(count=1), steps=1)
    assert gtp._CG_MEMPOOL == CudaGraphManager.global_mempool is not None


class TestCompletedInBackward:
    def weight(self, name, previous=None, **attributes):
        made = SimpleNamespace(name=name, is_gtp_weight_remat=True, prev_w=previous, next_w=None, **attributes)
        if previous is not None:
            previous.next_w = made
        return made

    def test_experts_of_a_layer_are_complete_together(self):
        first = self.weight("first")
        experts = [self.weight(f"expert {i}", first, is_routed_expert=True, weight_list=None) for i in range(2)]
        experts[0].weight_list, first.next_w = experts, experts[0]
        assert completed_in_backward([first]) == [first, *experts]
        assert completed_in_backward(experts) == []
