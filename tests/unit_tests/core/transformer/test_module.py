"""Test that a call of a layer with graphs replays them."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.transformer import module
from megatron.core.transformer.module import GraphableMegatronModule
from tests.unit_tests.core.transformer._cuda_graphs.layer_graphs import layer_graph

pytestmark = pytest.mark.usefixtures("cpu_backend")


class Layer(GraphableMegatronModule):
    """A layer that records its events."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(
            hidden_size=4,
            context_parallel_size=1,
            sequence_parallel=False,
            tensor_model_parallel_size=1,
            fp32_residual_connection=False,
            params_dtype=torch.float32,
            bf16=False,
            fp16=False,
            cuda_graph_impl="transformer_engine",
            overlap_moe_expert_parallel_comm=False,
        )
        self.events: list[object] = []
        self.cuda_graphs: list = []
        self.cuda_graph_manual_hooks: list[tuple] = []

    def forward(self, x, mask=None):
        self.events.append("eager")
        return x


def graph(layer, name):
    def replay(*args, **kwargs):
        layer.events.append(name)
        return name

    return layer_graph(graphed=replay, ignored={"mask"})


@pytest.fixture
def layer():
    layer = Layer()
    layer.cuda_graphs = [graph(layer, "first"), graph(layer, "second")]
    return layer


X = torch.zeros(2)


def test_hooks_may_change_arguments_and_output(layer):
    layer.register_forward_pre_hook(lambda module, args, kwargs: ((), {"hidden_states": X}), with_kwargs=True)
    layer.register_forward_hook(lambda module, args, output: output + " changed")
    assert layer("anything") == "first changed"


def test_manual_hooks_run_before_replay(layer):
    layer.cuda_graph_manual_hooks = [(layer.events.append, ("gather",))]
    layer(X)
    assert layer.events[0] == "gather"


@pytest.mark.parametrize(("microbatch", "expected"), [(0, "first"), (1, "second"), (2, "first"), (3, "second")])
def test_microbatch_in_flight_replays_its_own_graph(layer, microbatch, expected):
    layer.current_microbatch = microbatch
    assert layer(X) == expected


def kept(**changes):
    """Return a layer graph whose replays return their arguments."""
    return layer_graph(graphed=lambda *args, **kwargs: (args, kwargs), shape=X.shape, **changes)


def test_mismatched_call_runs_eagerly_with_hooks(layer):
    layer.cuda_graphs = [kept()]
    layer.register_forward_hook(lambda module, args, output: layer.events.append("replaying" in vars(module)))
    other = torch.zeros(3, 1)
    assert layer(other) is other
    assert layer.events == ["eager", False]
    (given,), _ = layer(X)
    assert given is X
    assert layer.events[2:] == [True]
    assert "replaying" not in vars(layer)


class DecidesItself(Layer):
    """A layer that replays only without a mask."""

    def _should_call_te_cudagraph(self, *args, **kwargs):
        return "mask" not in kwargs


def test_subclass_may_decide_by_arguments():
    layer = DecidesItself()
    layer.cuda_graphs = [graph(layer, "first")]
    assert layer(X) == "first"
    assert layer(X, mask=X) is X


def test_user_may_decide_for_one_layer(layer):
    layer._should_call_te_cudagraph = lambda *args, **kwargs: False
    assert layer(X) is X


def test_other_cuda_graph_impl_runs_eagerly(layer):
    layer.config.cuda_graph_impl = "none"
    assert layer(X) is X


@pytest.mark.parametrize("microbatch", [0, 1])
def test_graphs_get_hidden_states_by_position(layer, microbatch):
    layer.cuda_graphs, layer.current_microbatch = [kept(keywords={"mask": X})], microbatch
    expected = ((X,), {"mask": X, "is_first_microbatch": microbatch == 0})
    assert layer(hidden_states=X, mask=None) == expected
    assert layer(X, mask=None) == expected


def test_forward_is_restored_after_failed_replay(layer):
    def fails(*args, **kwargs):
        raise KeyError("replay failed")

    layer.cuda_graphs = [layer_graph(graphed=fails)]
    with pytest.raises(KeyError, match="replay failed"):
        layer(X)
    assert "forward" not in vars(layer)


def test_user_forward_is_restored_after_replay(layer):
    def wrapped(x):
        return "wrapped"

    layer.forward = wrapped
    assert layer(X) == "first"
    assert layer.forward is wrapped


def test_compiled_layer_replays_its_graph(layer):
    layer._compiled_call_impl = lambda *args, **kwargs: "compiled"
    assert layer(X) == "first"


def static_hidden_states(**config):
    layer = Layer()
    for name, value in config.items():
        setattr(layer.config, name, value)
    return layer.get_layer_static_inputs(8, 2)["hidden_states"]


def test_static_hidden_states_are_leaves():
    hidden_states = static_hidden_states(params_dtype=torch.bfloat16)
    assert hidden_states.shape == (8, 2, 4)
    assert hidden_states.is_leaf
    assert hidden_states.requires_grad


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        *(({"params_dtype": dtype}, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        ({"bf16": True}, torch.bfloat16),
        ({"fp16": True}, torch.float16),
        ({"fp32_residual_connection": True, "bf16": True}, torch.float32),
        ({"fp32_residual_connection": True, "fp16": True}, torch.float32),
        ({"fp32_residual_connection": True, "params_dtype": torch.bfloat16}, torch.float32),
    ],
)
def test_static_hidden_states_dtype(config, dtype):
    assert static_hidden_states(**config).dtype == dtype


def layer_graphs(count, num_microbatches):
    return [layer_graph(lambda *args, i=i, **kwargs: i, num_microbatches=num_microbatches) for i in range(count)]


def replays(layer, microbatches, monkeypatch):
    """Yield the output of ``layer`` for each of ``microbatches`` micro-batches."""
    monkeypatch.setattr(module, "get_num_microbatches", lambda: microbatches)
    for layer.current_microbatch in range(microbatches):
        yield layer(X)


@pytest.mark.parametrize("captured", [1, 3])
def test_captured_micro_batches_replay(layer, monkeypatch, captured):
    layer.cuda_graphs = layer_graphs(captured, captured)
    assert list(replays(layer, captured, monkeypatch)) == list(range(captured))


@pytest.mark.parametrize(("captured", "given"), [(3, 2), (3, 4)])
def test_other_number_of_micro_batches_is_refused(layer, monkeypatch, captured, given):
    layer.cuda_graphs = layer_graphs(captured, captured)
    with pytest.raises(ValueError, match=f"for steps of {captured} micro-batches, but this step has {given}\\b"):
        next(replays(layer, given, monkeypatch))


def test_extra_micro_batch_is_refused(layer, monkeypatch):
    monkeypatch.setattr(module, "get_num_microbatches", lambda: 3)
    layer.cuda_graphs, layer.current_microbatch = layer_graphs(3, 3), 3
    with pytest.raises(ValueError, match="for steps of 3 micro-batches, but this step has 4"):
        layer(X)


def test_one_graph_serves_every_micro_batch(layer, monkeypatch):
    layer.cuda_graphs = layer_graphs(1, None)
    assert list(replays(layer, 5, monkeypatch)) == [0] * 5
