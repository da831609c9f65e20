"""Test layer graphs: the calls they match, and the arguments passed to the engine."""

import copy
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron.core.transformer._cuda_graphs.errors import ChangedSinceCaptureError
from megatron.core.transformer._cuda_graphs.inputs import DefaultInputs
from megatron.core.transformer._cuda_graphs.layer_graph import ATTENTION_INPUTS, LayerGraphs, unchanged_dispatcher
from megatron.core.transformer._cuda_graphs.snapshot import Snapshot, module_aspects, named

from .layer_graphs import layer_graph

HIDDEN, MASK = torch.zeros(8, 2, 4), torch.zeros(1, 1, 8, 8, dtype=torch.bool)


def masked(**changes):
    return layer_graph(keywords={"attention_mask": MASK}, **changes)


def replayed_with(graph, *args, **kwargs):
    assert graph.replay(args, kwargs) == "output"
    return graph.graphed.calls[-1]


def test_arguments_and_first_microbatch_reach_the_engine():
    given = {"attention_mask": ~MASK, "is_first_microbatch": True}
    assert replayed_with(masked(), HIDDEN, **given) == ((HIDDEN,), given)


@pytest.mark.parametrize("given", [{}, {"attention_mask": None}], ids=["left out", "None"])
def test_missing_keyword_keeps_captured_value(given):
    _, kwargs = replayed_with(masked(), HIDDEN, **given)
    assert kwargs["attention_mask"] is MASK


def test_keyword_is_restored_after_other_value():
    static, defaults = MASK.clone(), DefaultInputs()
    first, second = (layer_graph(keywords={"attention_mask": static}, defaults=defaults) for _ in range(2))
    for _ in range(2):
        replayed_with(first, HIDDEN, attention_mask=~MASK)
        static.copy_(~MASK)  # like a replay
        for layer in (second, first):
            _, kwargs = replayed_with(layer, HIDDEN)
            assert kwargs["attention_mask"] is static  # nothing to copy
            assert torch.equal(static, MASK)


def test_unknown_keyword_is_refused_unless_none():
    _, kwargs = replayed_with(masked(), HIDDEN, inference_context=None)
    assert "inference_context" not in kwargs
    with pytest.raises(ValueError, match=r"layer 3 was captured without packed_seq_params.*--cuda-graph-impl none"):
        replayed_with(masked(), HIDDEN, packed_seq_params=object())


def test_graphs_without_attention_ignore_its_inputs():
    graph = masked(ignored=ATTENTION_INPUTS)
    _, kwargs = replayed_with(graph, HIDDEN, attention_mask=MASK, rotary_pos_emb=HIDDEN)
    assert kwargs == {"attention_mask": MASK}
    with pytest.raises(ValueError, match="captured without padding_mask"):
        replayed_with(graph, HIDDEN, padding_mask=MASK)


@pytest.mark.parametrize("args", [(), (HIDDEN, MASK)], ids=["too few", "too many"])
def test_other_number_of_positional_inputs_is_refused(args):
    with pytest.raises(ValueError, match=rf"captured with one positional input, got {len(args)}") as error:
        replayed_with(masked(), *args)
    assert isinstance(error.value, AssertionError)  # which callers of megatron-core may catch


def test_gathered_parameters_are_compared_once_per_step():
    gathered = mock.Mock()
    graph = layer_graph(gathered=gathered)
    for first in (True, False, False):
        replayed_with(graph, HIDDEN, is_first_microbatch=first)
    assert gathered.check.call_count == 1


def test_reset_frees_graphs_and_static_inputs():
    static = [torch.zeros(1)]
    graph = layer_graph(keywords={"mask": static[0]})
    alive = weakref.ref(static.pop())
    assert alive() is not None
    graph.reset()
    assert graph.graphed.was_reset
    assert alive() is None


def test_deep_copy_has_no_graphs():
    layer = torch.nn.Module()
    layer.cuda_graphs = LayerGraphs([layer_graph()])
    assert copy.deepcopy(layer).cuda_graphs == []
    assert len(layer.cuda_graphs) == 1


def test_other_shape_runs_eagerly_with_one_warning(caplog):
    logged: set[str] = set()
    layers = [layer_graph(shape=HIDDEN.shape, logged=logged) for _ in range(2)]
    for graph in [*layers, *layers]:
        assert graph.fits(HIDDEN)
        assert not graph.fits(HIDDEN[:4])
    assert not layers[0].fits(HIDDEN[:2])
    first, second = caplog.messages
    assert "captured with hidden_states of (8, 2, 4). All layers run passes of shape (4, 2, 4) eagerly" in first
    assert first.endswith("and call helper.create_cudagraphs()")
    assert "(2, 2, 4)" in second


def test_engine_captures_shapes_without_eager_run():
    assert layer_graph().fits(HIDDEN[:4])  # the engine rejects it


@pytest.mark.parametrize("may_run_eagerly", [True, False])
def test_change_since_capture_runs_eagerly_or_raises(caplog, may_run_eagerly):
    layer = torch.nn.Sequential(torch.nn.Dropout(0.1))
    snapshot = Snapshot("change it back", *module_aspects(named(layer, "layer 3")))
    graph = layer_graph(snapshot=snapshot, may_run_eagerly=may_run_eagerly)
    assert graph.fits(HIDDEN)
    layer.eval()
    if may_run_eagerly:
        assert not any(graph.fits(HIDDEN) for _ in range(2))
        assert caplog.messages == [f"layer 3 runs eagerly: {snapshot.reason()}"]
    else:
        with pytest.raises(ChangedSinceCaptureError, match=r"training of layer 3 .*change it back"):
            graph.fits(HIDDEN)


def test_pass_without_gradients_runs_eagerly():
    with torch.no_grad():
        assert not layer_graph(may_run_eagerly=True).fits(HIDDEN)
        assert layer_graph().fits(HIDDEN)


def test_token_dispatcher_is_restored_after_eager_pass():
    manager = SimpleNamespace(routing_map="captured")
    dispatcher = SimpleNamespace(hidden_shape=(8, 2), _comm_manager=manager)
    layer = SimpleNamespace(mlp=SimpleNamespace(token_dispatcher=dispatcher))

    def eager_pass():
        dispatcher.hidden_shape, dispatcher.probs, manager.routing_map = (4, 2), "of this pass", None
        raise KeyError

    with pytest.raises(KeyError), unchanged_dispatcher(layer):
        eager_pass()
    assert vars(dispatcher) == {"hidden_shape": (8, 2), "_comm_manager": manager}
    assert manager.routing_map == "captured"
    with unchanged_dispatcher(SimpleNamespace()):  # like a dense layer
        pass
