"""Test graphs of a vision encoder, in one process as the first of one or two pipeline stages."""

import inspect
import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper, VisionTECudaGraphHelper, set_current_microbatch
from megatron.core.transformer.transformer_layer import TransformerLayer
from tests.support.replaced import replaced
from tests.support.trainings import models, vision_training
from tests.support.trainings.case import Case
from tests.support.trainings.vision_training import CLASSES, PATCH

from ..engine.captured_cases import assert_same_bits, copies, descend, device_tensor
from .conftest import MICROBATCHES
from .stages import set_microbatches

pytestmark = pytest.mark.sampled

UPSTREAM = replaced("megatron.core.transformer.cuda_graphs")
ORDERS = {1: [1, -1, 1, -1, 1, -1], 2: [1, 1, -1, 1, -1, -1]}  # by number of pipeline stages
OTHER_ORDERS = {2: [1, 1, -1, -1], 4: [1, 1, -1, 1, -1, 1, -1, -1]}  # for two stages, by number of micro-batches
SIDE = 4 * PATCH
TOKENS = 16  # one per patch


@pytest.fixture(params=[1, 2], ids=["one stage", "two stages"])
def order(request):
    """Set up one or two pipeline stages, and return the order of passes."""
    request.getfixturevalue({1: "one_stage", 2: "two_stages"}[request.param])
    return ORDERS[request.param]


def new_model(graphs=True, modules=()):
    """Return a CLIP classifier with two layers in this pipeline stage, and its configuration."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, use_cudagraphable_rng=True, force_reset_rng=True)
    layers = 2 * parallel_state.get_pipeline_model_parallel_world_size()
    case = Case(model="vision", layers=layers, hidden=32, dropout=0.1, modules=modules)
    config = models.transformer_config(case, graphs)
    return vision_training.classifier(config, SIDE).cuda(), config


def helper_for(model, config, **arguments):
    """Wrap ``model`` in two modules, and return a helper for it."""
    chunk = torch.nn.Module()
    chunk.module = torch.nn.Module()
    chunk.module.module = model
    return VisionTECudaGraphHelper([chunk], config, TOKENS, 4, **arguments)


def layers_of(model):
    return list(model.vision_model.decoder.layers)


def take_gradients(params, main_grads):
    """Add each ``param.grad`` to the main gradient and clear it, like Megatron's wrappers."""
    for param, main_grad in zip(params, main_grads, strict=True):
        main_grad += param.grad
        param.grad = None


def train(order, graphs, modules=(), steps=10, warmup=3, later=None):
    """Train, and return all losses, gradients and parameters, and the number of graphs per layer.

    ``later`` replaces ``order`` after the first step with graphs.
    """
    model, config = new_model(graphs, modules=modules)
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
def test_graphs_are_bit_identical_to_eager(order, modules):
    expected, _ = train(order, graphs=False)
    numbers, graphs = train(order, graphs=True, modules=modules)
    assert_same_bits(numbers, expected)
    assert graphs == [1 if order == ORDERS[1] else MICROBATCHES] * 2


@pytest.mark.parametrize("microbatches", OTHER_ORDERS)
@pytest.mark.parametrize("recaptures", [0, 1])
def test_other_number_of_micro_batches_is_recaptured(two_stages, monkeypatch, caplog, microbatches, recaptures):
    monkeypatch.setattr(cuda_graphs, "MAX_RECAPTURES", recaptures)
    later = OTHER_ORDERS[microbatches]
    expected, _ = train(ORDERS[2], graphs=False, later=later)
    set_microbatches(MICROBATCHES)
    with caplog.at_level(logging.WARNING):
        numbers, graphs = train(ORDERS[2], graphs=True, later=later)
    assert_same_bits(numbers, expected)
    assert graphs == [microbatches * recaptures] * 2
    eagerly = f"steps now have {microbatches} micro-batches instead of"
    assert (eagerly in caplog.text) == (not recaptures)


def test_missing_before_step_is_an_error(two_stages, monkeypatch):
    monkeypatch.setattr(VisionTECudaGraphHelper, "before_step", lambda helper: helper.graphs_created())
    with pytest.raises(ValueError, match=r"call before_step\(\) of each .* VisionTECudaGraphHelper before each"):
        train(ORDERS[2], graphs=True, later=OTHER_ORDERS[2])


def test_capture_zeroes_no_gradients(one_stage):
    model, config = new_model()
    model(device_tensor(1, 3, SIDE, SIDE), torch.zeros(1, dtype=torch.long, device="cuda")).mean().backward()
    gradients = copies([param.grad for param in model.parameters()])
    helper_for(model, config).create_cudagraphs()
    assert_same_bits([param.grad for param in model.parameters()], gradients)


@pytest.mark.parametrize("with_vision", [True, False])
def test_capture_waits_for_no_other_rank(two_stages, monkeypatch, with_vision):
    model, config = new_model()
    helper = helper_for(model if with_vision else torch.nn.Linear(1, 1), config)
    waits = mock.Mock(side_effect=AssertionError("a rank without a vision model never comes here"))
    for name in ("barrier", "all_reduce", "all_gather_object", "broadcast"):
        monkeypatch.setattr(dist, name, waits)
    helper.create_cudagraphs()
    assert helper.graphs_created() is with_vision


def test_discovered_layers_equal_megatron_core(one_stage):
    helper = helper_for(*new_model())
    names = ["chunks_with_decoder", "callables_per_chunk"]
    found = []
    for kind in (VisionTECudaGraphHelper, UPSTREAM.VisionTECudaGraphHelper):
        kind._discover_layers(helper)
        found.append({name: getattr(helper, name) for name in names})
    assert found[0] == found[1]


def test_model_without_vision_has_no_graphs(one_stage, caplog):
    _, config = new_model()
    with caplog.at_level(logging.WARNING):
        helper = helper_for(torch.nn.Linear(1, 1), config)
        helper.create_cudagraphs()
    assert (helper.before_step(), helper.graphs_created()) == (True, False)
    assert "VisionTECudaGraphHelper: no graphable layers found" in caplog.text
    assert (helper.num_layers_per_chunk, helper.num_model_chunks) == ([0], 1)


def order_of(helper):
    _, arguments = helper._get_cuda_graph_input_data()
    return arguments["_order"]


def test_virtual_stages_keep_every_micro_batch(two_stages):
    model, config = new_model()
    helper = VisionTECudaGraphHelper([model, torch.nn.Linear(1, 1)], config, TOKENS, 1)
    assert order_of(helper) == [1, 1, 1, -1, -1, -1]


def test_parameters_equal_megatron_core():
    def parameters(kind):
        return [(p.name, p.default) for p in inspect.signature(kind.__init__).parameters.values()]

    assert parameters(VisionTECudaGraphHelper) == parameters(UPSTREAM.VisionTECudaGraphHelper)
    assert issubclass(VisionTECudaGraphHelper, TECudaGraphHelper)


def test_none_outputs_are_removed(one_stage, monkeypatch):
    expected, _ = train(ORDERS[1], graphs=False, steps=4)
    monkeypatch.setattr(TransformerLayer, "_te_cuda_graph_capture", TransformerLayer.forward)  # (output, None)
    numbers, _ = train(ORDERS[1], graphs=True, steps=4)
    assert_same_bits(numbers, expected)


def test_wrapper_of_vision_layers_can_be_patched():
    with mock.patch.object(cuda_graphs, "_wrap_graph_for_vision", str):
        assert VisionTECudaGraphHelper._role.wrap(1) == "1"
