"""layer_graph: which arguments a layer's graphs take."""

import copy
import weakref
from unittest import mock

import pytest
import torch

from megatron.core.transformer._cuda_graphs.eager_passes import EagerPasses
from megatron.core.transformer._cuda_graphs.expected_inputs import DefaultInputs
from megatron.core.transformer._cuda_graphs.layer_graph import LayerGraph, LayerGraphs
from megatron.core.transformer._cuda_graphs.snapshot import Snapshot, module_aspects, named


class Graphed:
    """An engine's callable that keeps what it was called with."""

    def __init__(self):
        self.calls: list[tuple[tuple, dict]] = []
        self.was_reset = False

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return "output"

    def reset(self):
        self.was_reset = True


HIDDEN, MASK = torch.zeros(8, 2, 4), torch.zeros(1, 1, 8, 8, dtype=torch.bool)


def layer_graph(has_attention=True):
    static_kwargs = {"attention_mask": MASK}
    return LayerGraph("layer 3 (TransformerLayer)", Graphed(), (HIDDEN,), static_kwargs, has_attention=has_attention)


def replayed_with(graph, *args, **kwargs):
    graph(*args, **kwargs)
    return graph.graphed.calls[-1]


def test_arguments_like_the_captured_ones_reach_the_graph():
    hidden, mask = HIDDEN + 1, ~MASK
    args, kwargs = replayed_with(layer_graph(), hidden, attention_mask=mask)
    assert args[0] is hidden
    assert kwargs == {"attention_mask": mask}


def test_what_the_graph_returns_is_returned():
    assert layer_graph()(HIDDEN, attention_mask=MASK) == "output"


def test_options_of_the_replay_reach_the_engine():
    options = {"is_first_microbatch": True, "cuda_graph_stream": "stream", "cuda_graph_event": "event"}
    _, kwargs = replayed_with(layer_graph(), HIDDEN, attention_mask=MASK, **options)
    assert kwargs == {"attention_mask": MASK, **options}


# ------------------------------------------------------------------------------------------------- None keywords


@pytest.mark.parametrize("given", [{}, {"attention_mask": None}], ids=["left out", "None"])
def test_a_keyword_that_was_never_given_keeps_what_capture_put_there(given):
    _, kwargs = replayed_with(layer_graph(), HIDDEN, **given)
    assert kwargs["attention_mask"] is MASK


def test_a_keyword_left_out_after_it_was_given_is_as_at_capture():
    static, defaults = MASK.clone(), DefaultInputs()
    of_both = {"attention_mask": static}
    first, second = (
        LayerGraph("a layer", Graphed(), (HIDDEN,), of_both, has_attention=True, defaults=defaults) for _ in range(2)
    )
    for _ in range(2):
        first(HIDDEN, attention_mask=~MASK)
        static.copy_(~MASK)  # as a replay does
        for layer in (second, first):
            _, kwargs = replayed_with(layer, HIDDEN)
            assert kwargs["attention_mask"] is static  # nothing to copy
            assert torch.equal(static, MASK)


def test_the_value_at_capture_is_kept_once_for_all_layers():
    defaults, statics = DefaultInputs(), [MASK.clone() for _ in range(3)]
    copied: list[torch.Tensor] = []

    def to(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        copied.append(tensor)
        return MASK

    with mock.patch.object(torch.Tensor, "to", to):
        for static in statics:
            defaults.will_overwrite("attention_mask", static)
    assert [tensor.data_ptr() for tensor in copied] == [statics[0].data_ptr()]


def test_a_keyword_of_capture_must_be_a_tensor():
    with pytest.raises(TypeError, match=r"layer 3 .*: attention_mask must be a tensor for a CUDA graph, got 'mask'"):
        layer_graph()(HIDDEN, attention_mask="mask")


# ---------------------------------------------------------------------------------------------- unknown keywords


def test_an_unknown_keyword_may_be_none():
    _, kwargs = replayed_with(layer_graph(), HIDDEN, attention_mask=MASK, inference_context=None)
    assert "inference_context" not in kwargs


def test_an_unknown_keyword_is_refused_by_name():
    with pytest.raises(ValueError, match=r"layer 3 .* was captured without packed_seq_params.*--cuda-graph-impl none"):
        layer_graph()(HIDDEN, attention_mask=MASK, packed_seq_params=object())


def test_a_layer_without_attention_drops_what_only_attention_reads():
    _, kwargs = replayed_with(layer_graph(has_attention=False), HIDDEN, attention_mask=MASK, rotary_pos_emb=HIDDEN)
    assert kwargs == {"attention_mask": MASK}


@pytest.mark.parametrize("name", ["packed_seq_params", "padding_mask"])
def test_a_layer_without_attention_refuses_what_it_would_read(name):
    with pytest.raises(ValueError, match=f"captured without {name}"):
        layer_graph(has_attention=False)(HIDDEN, attention_mask=MASK, **{name: MASK})


# ------------------------------------------------------------------------------------------- shapes, types, counts


def test_another_shape_is_refused_with_both_shapes():
    with pytest.raises(
        ValueError, match=r"layer 3 .* hidden_states of \(8, 2, 4\) .* called with \(6, 2, 4\).*--seq-length"
    ):
        layer_graph()(HIDDEN[:6])


def test_another_dtype_is_refused_with_both_dtypes():
    with pytest.raises(ValueError, match=r"hidden_states of .*torch.float32 and is called with .*torch.bfloat16"):
        layer_graph()(HIDDEN.bfloat16())


def test_a_keyword_of_another_shape_is_refused_by_name():
    with pytest.raises(ValueError, match="captured with attention_mask of"):
        layer_graph()(HIDDEN, attention_mask=MASK[..., :4])


def test_hidden_states_must_be_a_tensor():
    with pytest.raises(TypeError, match="hidden_states must be a tensor for a CUDA graph, got None"):
        layer_graph()(None)


@pytest.mark.parametrize("args", [(), (HIDDEN, MASK)], ids=["too few", "too many"])
def test_another_number_of_positional_inputs_is_refused(args):
    with pytest.raises(ValueError, match=rf"captured with 1 positional inputs and is called with {len(args)}"):
        layer_graph()(*args)


def test_what_is_around_the_graphs_gets_the_engines_callable_and_its_arguments():
    graph = layer_graph()
    graph.around = lambda graphed, args, kwargs: (graphed, args, kwargs)
    graphed, (hidden,), kwargs = graph(HIDDEN, attention_mask=MASK)
    assert (graphed, kwargs) == (graph.graphed, {"attention_mask": MASK})
    assert hidden is HIDDEN


# ------------------------------------------------------------------------------------------------------- lifetime


def test_reset_frees_the_graphs_and_the_static_inputs():
    static = [torch.zeros(1), torch.zeros(1)]
    graph = LayerGraph("layer", Graphed(), (static[0],), {"mask": static[1]}, has_attention=True)
    alive = [weakref.ref(tensor) for tensor in static]
    static.clear()
    assert alive[1]() is not None
    graph.reset()
    assert graph.graphed.was_reset
    assert [tensor() for tensor in alive] == [None, None]


def test_delayed_weight_gradients_of_the_engine_are_offered_where_it_has_them():
    class Delaying(Graphed):
        def backward_dw(self):
            return "weight gradients"

    assert LayerGraph("layer", Delaying(), (), {}, has_attention=False).backward_dw() == "weight gradients"
    assert not hasattr(layer_graph(), "backward_dw")


def test_a_deep_copy_of_a_layer_has_no_graphs():
    layer = torch.nn.Module()
    layer.cuda_graphs = LayerGraphs([layer_graph()])
    assert copy.deepcopy(layer).cuda_graphs == []
    assert len(layer.cuda_graphs) == 1


# ------------------------------------------------------------------------------------ engines that check their inputs


class Checking(Graphed):
    """As this project's engine, which is told how errors are to call its inputs."""

    def name_inputs(self, owner, names, advice):
        self.told = owner, names, advice


def test_an_engine_that_checks_its_inputs_is_told_their_names():
    graphed = Checking()
    graph = LayerGraph("layer 3", graphed, (HIDDEN, HIDDEN), {"attention_mask": MASK}, has_attention=True)
    owner, names, advice = graphed.told
    assert (owner, names) == ("layer 3", ("hidden_states", "argument 1", "attention_mask"))
    assert "--seq-length" in advice
    graph(HIDDEN[:6], HIDDEN)  # not compared a second time


def test_an_input_that_requires_grad_and_did_not_at_capture_is_refused():
    with pytest.raises(ValueError, match="captured with hidden_states that requires no grad"):
        layer_graph()(HIDDEN.clone().requires_grad_())


# ------------------------------------------------------------------------------------------------------- other shapes


def graph_with(eager_passes):
    return LayerGraph("layer 3", Graphed(), (HIDDEN,), {}, has_attention=True, eager_passes=eager_passes)


def test_a_shape_that_is_new_is_logged(caplog):
    passes = EagerPasses(", until tomorrow")
    layers = [graph_with(passes), graph_with(passes)]
    for graph in [*layers, *layers]:
        assert graph.fits(HIDDEN)
        assert not graph.fits(HIDDEN[:4])
    assert not layers[0].fits(HIDDEN[:2])
    first, second = caplog.messages
    assert "captured with hidden_states of (8, 2, 4). Passes with (4, 2, 4) run eagerly" in first
    assert first.endswith("in all layers, until tomorrow")
    assert "(2, 2, 4)" in second


def test_passes_of_another_shape_are_counted():
    passes = EagerPasses()
    for _ in range(3):
        graph_with(passes).fits(HIDDEN[:4])
    assert passes.shape_of_all(3) == (4, 2)


def test_where_passes_may_not_run_eagerly_every_shape_is_given_to_the_graph():
    assert graph_with(None).fits(HIDDEN[:4])


def test_a_change_after_capture_is_named_once(caplog):
    layer = torch.nn.Sequential(torch.nn.Dropout(0.1))
    snapshot = Snapshot("", *module_aspects(named(layer, "layer 3")))
    graph = LayerGraph(
        "layer 3",
        lambda *args, **kwargs: None,
        (HIDDEN,),
        {},
        has_attention=True,
        snapshot=snapshot,
        may_run_eagerly=True,
    )
    assert graph.fits(HIDDEN)
    layer.eval()
    assert not any(graph.fits(HIDDEN) for _ in range(2))
    assert caplog.messages == [f"layer 3 runs eagerly: {snapshot.reason()}"]
    assert "training of layer 3" in caplog.text
