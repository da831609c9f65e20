"""vision_helper: graphs of a vision encoder, in one process as the first stage of a pipeline of one or two."""

import copy
import inspect
import logging
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from megatron.core.transformer.cuda_graphs import (
    TECudaGraphHelper,
    VisionTECudaGraphHelper,
    _wrap_graph_for_vision,
    get_vision_cuda_graph_seq_length,
    set_current_microbatch,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from tests.support import models, vision_training
from tests.support.case import Case
from tests.support.replaced import replaced
from tests.support.vision_training import CLASSES, PATCH
from tests.unit_tests.core.transformer._cuda_graphs.layer_graphs import layer_graph

from ..engine.captured_cases import Forward, assert_same_bits, copies, descend, device_tensor, none_outputs
from .conftest import MICROBATCHES
from .stages import set_microbatches

UPSTREAM = replaced("megatron.core.transformer.cuda_graphs")
ORDERS = {1: [1, -1, 1, -1, 1, -1], 2: [1, 1, -1, 1, -1, -1]}  # by the number of pipeline stages
OTHER_ORDERS = {2: [1, 1, -1, -1], 4: [1, 1, -1, 1, -1, 1, -1, -1]}  # of two stages, by the number of micro-batches
SIDE = 4 * PATCH
TOKENS = 16  # a patch each


@pytest.fixture(params=[1, 2], ids=["one stage", "two stages"])
def order(request):
    """The order of passes of a step."""
    request.getfixturevalue({1: "one_stage", 2: "two_stages"}[request.param])
    return ORDERS[request.param]


def new_model(graphs=True, modules=()):
    """megatron-core's CLIP encoder with two layers in this pipeline stage, and a classifier."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, use_cudagraphable_rng=True, force_reset_rng=True)
    layers = 2 * parallel_state.get_pipeline_model_parallel_world_size()
    case = Case(vision=True, layers=layers, hidden=32, heads=2, dropout=0.1, modules=modules)
    config = models.transformer_config(case, graphs)
    return vision_training.classifier(config, SIDE).cuda(), config


def helper_for(model, config, **arguments):
    """The helper of a model in two wrappers."""
    chunk = torch.nn.Module()
    chunk.module = torch.nn.Module()
    chunk.module.module = model
    return VisionTECudaGraphHelper([chunk], config, TOKENS, 4, **arguments)


def layers_of(model):
    return list(model.vision_model.decoder.layers)


# ------------------------------------------------------------------------------------------------------- training


def take_gradients(params, main_grads):
    """Do as Megatron's wrappers do: a gradient may be a view of what the next replay overwrites."""
    for param, main_grad in zip(params, main_grads, strict=True):
        main_grad += param.grad
        param.grad = None


def train(order, graphs, modules=(), steps=10, warmup=3, later=None, options=None):
    """Every loss, gradient and parameter of a training, and how many graphs each layer had at the end.

    ``later`` is the order of the steps from the second with graphs on; ``options`` are further ones of the
    configuration.
    """
    model, config = new_model(graphs, modules=modules)
    vars(config).update(options or {})
    helper = helper_for(model, config) if graphs else None
    params = list(model.parameters())
    numbers = []
    for step in range(steps):
        if later is not None and step == warmup + 1:
            order = later
            set_microbatches(sum(run > 0 for run in order))
        if helper is not None and not helper.before_step() and step == warmup:
            helper.create_cudagraphs()
        main_grads = [torch.zeros_like(param) for param in params]
        in_flight: list[torch.Tensor] = []
        microbatch = 0
        for run in order:
            if run < 0:
                in_flight.pop(0).backward()
                take_gradients(params, main_grads)
                continue
            set_current_microbatch(model, microbatch)
            images = device_tensor(1, 3, SIDE, SIDE, seed=100 * step + microbatch, grad=False)
            labels = torch.tensor([(step + microbatch) % CLASSES], device="cuda")
            in_flight.append(model(images, labels).mean())
            numbers += copies(in_flight[-1:])
            microbatch += 1
        numbers += main_grads
        for param, grad in zip(params, main_grads, strict=True):
            param.grad = grad.clone()
        descend(params)
    graphs_per_layer = [len(layer.cuda_graphs) for layer in layers_of(model)] if graphs else []
    return numbers + copies(params), graphs_per_layer


@pytest.mark.parametrize("modules", [(), ("attn",), ("mlp",)], ids=["whole layers", "attn", "mlp"])
def test_graphs_train_bit_for_bit_as_eager(order, modules):
    expected, _ = train(order, graphs=False)
    numbers, graphs = train(order, graphs=True, modules=modules)
    assert_same_bits(numbers, expected)
    assert graphs == [1 if order == ORDERS[1] else MICROBATCHES] * 2


@pytest.mark.parametrize("microbatches", OTHER_ORDERS)
@pytest.mark.parametrize("captures", [1, 8])
def test_steps_of_another_number_of_micro_batches_have_graphs_of_their_own_or_none(
    two_stages, caplog, microbatches, captures
):
    later, options = OTHER_ORDERS[microbatches], {"cuda_graph_max_captures": captures}
    expected, _ = train(ORDERS[2], graphs=False, later=later)
    set_microbatches(MICROBATCHES)
    with caplog.at_level(logging.WARNING):
        numbers, graphs = train(ORDERS[2], graphs=True, later=later, options=options)
    assert_same_bits(numbers, expected)
    assert graphs == [microbatches if captures > 1 else 0] * 2
    eagerly = f"steps of {microbatches} micro-batches, and all that follow, run eagerly"
    assert (eagerly in caplog.text) is (captures == 1)


def test_where_the_helper_is_not_asked_before_steps_the_error_says_to(two_stages, monkeypatch):
    monkeypatch.setattr(VisionTECudaGraphHelper, "before_step", lambda helper: helper.graphs_created())
    with pytest.raises(ValueError, match=r"Call before_step\(\) of each .* VisionTECudaGraphHelper before each"):
        train(ORDERS[2], graphs=True, later=OTHER_ORDERS[2])


def test_a_graph_of_another_microbatch_is_noticed(two_stages):
    with (
        mock.patch(f"{__name__}.set_current_microbatch"),  # so all micro-batches in flight share a graph
        pytest.raises(RuntimeError, match="activations a later replay has overwritten"),
    ):
        train(ORDERS[2], graphs=True)


# --------------------------------------------------------------------------------------------------------- capture


def test_nothing_is_zeroed_by_capture(one_stage):
    model, config = new_model()
    model(device_tensor(1, 3, SIDE, SIDE), torch.zeros(1, dtype=torch.long, device="cuda")).mean().backward()
    gradients = copies([param.grad for param in model.parameters()])
    helper_for(model, config).create_cudagraphs()
    assert_same_bits([param.grad for param in model.parameters()], gradients)


def test_metrics_of_moe_layers_survive_capture(one_stage):
    from megatron.core.transformer.moe import moe_logging

    model, config = new_model()
    with mock.patch.object(moe_logging, "get_moe_metrics_tracker") as tracker:
        helper_for(model, config).create_cudagraphs()
    tracker.assert_not_called()


@pytest.mark.parametrize("with_vision", [True, False])
def test_no_other_rank_is_waited_for(two_stages, monkeypatch, with_vision):
    model, config = new_model()
    helper = helper_for(model if with_vision else torch.nn.Linear(1, 1), config)
    waits = mock.Mock(side_effect=AssertionError("a rank without a vision model never comes here"))
    for name in ("barrier", "all_reduce", "all_gather_object", "broadcast"):
        monkeypatch.setattr(dist, name, waits)
    helper.create_cudagraphs()
    assert helper.graphs_created() is with_vision


def test_deleted_graphs_leave_layers_that_run_eagerly_and_can_be_captured_again(one_stage):
    model, config = new_model()
    helper = helper_for(model, config)
    helper.create_cudagraphs()
    graphs = [graph for layer in layers_of(model) for graph in layer.cuda_graphs]
    helper.delete_cuda_graphs()
    assert not any(layer.cuda_graphs for layer in layers_of(model))
    assert all(graph.graphed.forward_graph is None for graph in graphs)
    helper.create_cudagraphs()
    assert all(layer.cuda_graphs for layer in layers_of(model))


def test_manual_hooks_are_not_set(one_stage):
    model, config = new_model()
    helper_for(model, config).cuda_graph_set_manual_hooks()  # the wrappers have no hooks to make
    assert not any(layer.cuda_graph_manual_hooks for layer in layers_of(model))


def test_a_users_backward_hook_that_reads_gradients_runs_at_replays_only(one_stage):
    model, config = new_model()
    seen = []
    layers_of(model)[0].register_full_backward_hook(lambda module, grads, grad_outputs: seen.append(grad_outputs[0]))
    helper_for(model, config).create_cudagraphs()
    assert seen == []
    model(device_tensor(1, 3, SIDE, SIDE), torch.zeros(1, dtype=torch.long, device="cuda")).mean().backward()
    assert [bool(grad.any()) for grad in seen] == [True]


# -------------------------------------------------------------------------------------------------------- discovery


def test_the_layers_of_the_vision_model_are_found(one_stage):
    model, config = new_model()
    helper = helper_for(model, config)
    assert helper.flattened_callables == helper.callables == layers_of(model)
    assert (helper.num_layers, helper.num_layers_per_chunk, helper.num_model_chunks) == (2, [2], 1)
    assert helper.vision_model is model.vision_model


def test_discovered_layers_are_those_of_megatron_core(one_stage):
    helper = helper_for(*new_model())
    names = ["vision_model", "callables", "num_layers", "chunks_with_decoder", "callables_per_chunk"]
    found = []
    for kind in (VisionTECudaGraphHelper, UPSTREAM.VisionTECudaGraphHelper):
        kind._discover_layers(helper)
        found.append({name: getattr(helper, name) for name in names})
    assert found[0] == found[1]


def test_layers_that_are_captured_are_those_discovered(one_stage):
    class PlugIn(VisionTECudaGraphHelper):
        def _discover_layers(self):
            UPSTREAM.VisionTECudaGraphHelper._discover_layers(self)
            for layers in (self.callables_per_chunk[0], self.flattened_callables, self.callables_per_chunk_is_mtp[0]):
                del layers[0]

    model, config = new_model()
    PlugIn([model], config, TOKENS, 4).create_cudagraphs()
    assert [len(layer.cuda_graphs or ()) for layer in layers_of(model)] == [0, 1]


def test_steps_are_logged_by_the_language_models_helper_only(one_stage):
    model, config = new_model()
    config.cuda_graph_step_log = lambda: pytest.fail("a second log of the same steps")
    assert not helper_for(model, config).before_step()


def test_layers_that_are_not_graphable_are_left_out(one_stage):
    model, config = new_model(modules=("mamba",))
    assert helper_for(model, config).flattened_callables == []


def test_without_a_vision_model_there_are_no_graphs_and_a_warning(one_stage, caplog):
    _, config = new_model()
    with caplog.at_level(logging.WARNING):
        helper = helper_for(torch.nn.Linear(1, 1), config)
        assert "VisionTECudaGraphHelper: the model has no vision_model" in caplog.text
        helper.create_cudagraphs()
    assert (helper.before_step(), helper.graphs_created()) == (True, False)
    assert "VisionTECudaGraphHelper: no graphable layers found" in caplog.text
    assert (helper.num_layers, helper.num_layers_per_chunk, helper.num_model_chunks) == (0, [0], 1)


def test_the_vision_model_may_be_in_any_chunk(one_stage):
    model, config = new_model()
    chunks = [SimpleNamespace(vision_model=None), torch.nn.Linear(1, 1), model]
    helper = VisionTECudaGraphHelper(chunks, config, TOKENS, 1)
    assert helper.flattened_callables == layers_of(model)
    assert helper.num_model_chunks == 1


def order_of(helper):
    _, arguments = helper._get_cuda_graph_input_data()
    return arguments["_order"]


def test_between_virtual_stages_every_micro_batch_is_kept(two_stages):
    model, config = new_model()
    helper = VisionTECudaGraphHelper([model, torch.nn.Linear(1, 1)], config, TOKENS, 1)
    assert order_of(helper) == [1, 1, 1, -1, -1, -1]


def test_in_a_plain_pipeline_the_order_is_that_of_the_schedule(two_stages):
    assert order_of(helper_for(*new_model())) == ORDERS[2]


# ----------------------------------------------------------------------------------------------------------- inputs


def test_every_layer_and_microbatch_has_inputs_of_its_own_with_a_batch_of_one(one_stage):
    helper = helper_for(*new_model(), num_microbatches=3)
    args, kwargs = helper._get_sample_arguments(order=None)
    assert [tuple(tensor.shape) for tensor, *_ in args] == [(TOKENS, 1, 32)] * 6
    assert len({tensor.data_ptr() for tensor, *_ in args}) == 6
    assert [list(named) for named in kwargs] == [["attention_mask"]] * 6


def test_attention_sees_every_token(one_stage):
    _, kwargs = helper_for(*new_model())._get_sample_arguments(order=None)
    assert not any(named["attention_mask"].any() for named in kwargs)


def test_parameters_and_defaults_are_those_of_megatron_core():
    def parameters(kind):
        return [(p.name, p.default) for p in inspect.signature(kind.__init__).parameters.values()]

    assert parameters(VisionTECudaGraphHelper) == parameters(UPSTREAM.VisionTECudaGraphHelper)
    assert issubclass(VisionTECudaGraphHelper, TECudaGraphHelper)


def test_another_kind_of_graphs_is_refused_with_the_flag():
    with pytest.raises(ValueError, match="needs --cuda-graph-impl transformer_engine, got 'local'"):
        VisionTECudaGraphHelper([], SimpleNamespace(cuda_graph_impl="local"), TOKENS, 1)


# ---------------------------------------------------------------------------------------------------- None outputs


def returns(output):
    return _wrap_graph_for_vision(lambda *args, **kwargs: output)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (("hidden states", None), ("hidden states",)),
        ((None, "hidden states", None, "context"), ("hidden states", "context")),
        (("hidden states",), ("hidden states",)),
        ((None, None), (None, None)),
        ("hidden states", "hidden states"),
        (["hidden states", None], ["hidden states", None]),
        (None, None),
        ((0, None, False), (0, False)),
    ],
)
def test_none_is_left_out_of_tuples_that_hold_more(output, expected):
    assert returns(output)() == expected
    assert UPSTREAM._wrap_graph_for_vision(lambda: output)() == expected


def test_arguments_reach_the_callable():
    assert _wrap_graph_for_vision(lambda *args, **kwargs: (args, kwargs, None))(1, a=2) == ((1,), {"a": 2})


def test_reset_and_delayed_weight_gradients_are_the_callables():
    graph = mock.Mock()
    wrapped = _wrap_graph_for_vision(graph)
    assert wrapped.reset is graph.reset
    assert wrapped.backward_dw is graph.backward_dw
    assert not hasattr(_wrap_graph_for_vision(lambda: None), "backward_dw")


def test_a_wrapped_graph_can_be_copied():
    assert copy.copy(_wrap_graph_for_vision(lambda: (1, None)))() == (1,)


def test_a_graph_of_a_layer_replays_it(cpu_backend):
    args = (device_tensor(4, 6),)
    graphed = make_graphed_callables(Forward(none_outputs), args)
    graph = layer_graph(_wrap_graph_for_vision(graphed))
    (output,) = graph(device_tensor(4, 6, seed=7))
    assert_same_bits([output], [graphed(device_tensor(4, 6, seed=7))[1]])


def test_a_layer_that_is_captured_with_its_context_trains_as_eager(one_stage, monkeypatch):
    expected, _ = train(ORDERS[1], graphs=False, steps=4)
    monkeypatch.setattr(TransformerLayer, "_te_cuda_graph_capture", TransformerLayer.forward)  # (output, None)
    numbers, _ = train(ORDERS[1], graphs=True, steps=4)
    assert_same_bits(numbers, expected)


# -------------------------------------------------------------------------------------------------- sequence length


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 4096),
        ({"num_position_embeddings": 1024}, 1024),
        ({"num_position_embeddings": 1030, "spatial_merge_size": 2}, 257),
        ({"num_position_embeddings": 1024, "max_vision_cuda_graph_seq_length": 300}, 300),
        ({"num_position_embeddings": 1024, "max_vision_cuda_graph_seq_length": None}, 1024),
        ({"spatial_merge_size": 2}, 4096),
    ],
)
def test_the_sequence_length_is_the_maximum_or_the_merged_patches_or_the_default(config, expected):
    assert get_vision_cuda_graph_seq_length(SimpleNamespace(**config)) == expected


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "max_vision_cuda_graph_seq_length": st.none() | st.integers(0, 9999),
            "num_position_embeddings": st.integers(0, 9999),
            "spatial_merge_size": st.integers(1, 8),
        },
    ),
    st.lists(st.integers(0, 9999), max_size=1),
)
def test_the_sequence_length_is_that_of_megatron_core(config, default):
    expected = UPSTREAM.get_vision_cuda_graph_seq_length(SimpleNamespace(**config), *default)
    assert get_vision_cuda_graph_seq_length(SimpleNamespace(**config), *default) == expected
