"""EvaluationGraph: which calls the graph of a layer for evaluation fits, and what its replays return."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch

from megatron.core.transformer._cuda_graphs.attribute_reads import AttributeReads
from megatron.core.transformer._cuda_graphs.dispatcher_state import DispatcherState
from megatron.core.transformer._cuda_graphs.eager_passes import EagerPasses
from megatron.core.transformer._cuda_graphs.engine.addresses import AddressGuard
from megatron.core.transformer._cuda_graphs.layer_graph import EvaluationGraph
from megatron.core.transformer._cuda_graphs.replay_conditions import ReplayConditions

HIDDEN, MASK = torch.zeros(8, 2, 4), torch.zeros(1, 1, 8, 8, dtype=torch.bool)


class Graphed:
    """An engine's callable whose outputs lie in memory that the next replay overwrites."""

    def __init__(self):
        self.calls: list[tuple[tuple, dict]] = []
        self.output = torch.zeros(3)

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        self.output.fill_(len(self.calls))
        return self.output, None


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)


@pytest.fixture
def layer():
    return Layer()


@pytest.fixture
def graph(layer):
    return evaluation_graph(layer)


def evaluation_graph(layer, has_attention=True):
    guard = AddressGuard(lambda: [layer.inner.weight], lambda index: "inner.weight", "")
    keywords, dispatcher = {"attention_mask": MASK}, DispatcherState(layer)
    reads = AttributeReads()
    reads.of[id(layer.inner)] = {"forward"}
    conditions = ReplayConditions(layer, reads, "layer 3", forward_replaced=True, parameters=False)
    return EvaluationGraph(
        "layer 3",
        Graphed(),
        (HIDDEN,),
        keywords,
        guard,
        dispatcher,
        has_attention=has_attention,
        conditions=conditions,
        eager_passes=EagerPasses(),
    )


@pytest.mark.parametrize(
    "call",
    [
        ((HIDDEN + 1,), {"attention_mask": ~MASK}),
        ((), {"hidden_states": HIDDEN, "attention_mask": MASK}),
        ((HIDDEN,), {}),
        ((HIDDEN,), {"attention_mask": None, "inference_context": None}),
    ],
    ids=["as captured", "by keyword", "no mask", "None"],
)
def test_tensors_as_at_capture_fit(graph, call):
    assert graph.accepts(*call)


@pytest.mark.parametrize(
    "call",
    [
        ((HIDDEN[:4],), {}),
        ((HIDDEN.half(),), {}),
        ((), {}),
        ((HIDDEN, HIDDEN), {}),
        ((HIDDEN,), {"attention_mask": MASK[..., :4]}),
        ((HIDDEN,), {"attention_mask": "causal"}),
        ((HIDDEN,), {"inference_context": object()}),
        ((HIDDEN,), {"rotary_pos_emb": HIDDEN}),
    ],
    ids=["shape", "dtype", "nothing", "two inputs", "shape of a mask", "no tensor", "other keyword", "for attention"],
)
def test_other_arguments_do_not_fit(graph, call):
    assert not graph.accepts(*call)


def test_inputs_of_attention_fit_a_graph_without_attention(layer):
    assert evaluation_graph(layer, has_attention=False).accepts((HIDDEN,), {"rotary_pos_emb": HIDDEN})


def test_a_hook_on_a_module_inside_the_layer_does_not_fit_while_it_is_there(graph, layer):
    handle = layer.inner.register_forward_hook(lambda *call: None)
    assert not graph.accepts((HIDDEN,), {})
    handle.remove()
    assert graph.accepts((HIDDEN,), {})


def test_a_hook_on_the_layer_itself_runs_around_replays_and_fits(graph, layer):
    layer.register_forward_hook(lambda *call: None)
    assert graph.accepts((HIDDEN,), {})


def test_a_hook_on_all_modules_does_not_fit_while_it_is_there(graph):
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *call: None)
    try:
        assert not graph.accepts((HIDDEN,), {})
    finally:
        handle.remove()
    assert graph.accepts((HIDDEN,), {})


def test_a_parameter_that_moved_does_not_fit_and_is_named_once(graph, layer, caplog):
    layer.inner.weight = torch.nn.Parameter(torch.zeros(2, 2))
    with caplog.at_level(logging.WARNING):
        assert not graph.accepts((HIDDEN,), {})
        assert not graph.accepts((HIDDEN,), {})
    (record,) = caplog.records
    assert record.message.startswith("layer 3 in evaluation runs eagerly: CUDA graphs use inner.weight at ")


def test_another_shape_is_named_once(graph, caplog):
    with caplog.at_level(logging.WARNING):
        graph.accepts((HIDDEN[:4],), {})
        graph.accepts((HIDDEN[:4],), {})
    (message,) = caplog.messages
    assert message.startswith(
        "layer 3 in evaluation was captured with hidden_states of (8, 2, 4). Passes with (4, 2, 4) run eagerly"
    )


def test_a_replay_sets_the_token_dispatcher_as_capture_has(layer):
    layer.mlp = torch.nn.Module()
    layer.mlp.token_dispatcher = dispatcher = SimpleNamespace(hidden_shape=(8, 2))
    graph = evaluation_graph(layer)
    dispatcher.hidden_shape = (4, 2)
    graph.replay((HIDDEN,), {})
    assert dispatcher.hidden_shape == (8, 2)


@pytest.mark.parametrize("said", [{}, {"is_first_microbatch": False}])
def test_no_replay_reads_weights_that_training_has_quantized(graph, said):
    graph.replay((HIDDEN,), said)
    ((_, given),) = graph.graphed.calls
    assert given["is_first_microbatch"] is True


def test_a_replay_returns_tensors_that_the_next_one_leaves_alone(graph):
    first, none = graph.replay((HIDDEN,), {})
    graph.replay((HIDDEN,), {})
    assert none is None
    assert first.tolist() == [1, 1, 1]


def test_without_a_mask_a_replay_reads_the_one_at_capture_whatever_others_were_given(graph):
    graph.replay((HIDDEN,), {"attention_mask": ~MASK})
    assert graph.accepts((HIDDEN,), {})
    graph.replay((HIDDEN,), {})
    ((_, given), (_, absent)) = graph.graphed.calls
    assert torch.equal(given["attention_mask"], ~MASK)
    assert torch.equal(absent["attention_mask"], MASK)


def test_a_copied_layer_has_none(graph, layer):
    layer.evaluation_graph = graph
    assert copy.deepcopy(layer).evaluation_graph is None
