"""Test that replays are rejected if the module changed since capture."""

from contextlib import nullcontext

import pytest
import torch

from megatron.core.transformer._cuda_graphs.errors import UnsupportedError
from megatron.core.transformer.cuda_graphs import create_cudagraphs, delete_cuda_graphs

from .local_graph_cases import batch, record, stack

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


@pytest.fixture
def model():
    """Return a stack of two layers with main gradients."""
    model = stack(count=2)
    for param in model.parameters():
        param.main_grad = torch.zeros_like(param)
    return model


CHANGES = {
    "freeze": (lambda linear: linear.bias.requires_grad_(False), "requires_grad of bias"),
    "replace": (lambda linear: setattr(linear, "bias", torch.nn.Parameter(linear.bias.detach())), "bias"),
    "move": (lambda linear: setattr(linear.bias, "data", linear.bias.data.clone()), "the address of bias"),
    "move main_grad": (
        lambda linear: setattr(linear.bias, "main_grad", linear.bias.main_grad.clone()),
        "the address of the main gradient of bias",
    ),
    "move buffer": (lambda linear: setattr(linear, "count", linear.count.clone()), "the address of count"),
    "hook": (lambda linear: linear.bias.register_hook(lambda grad: None), "hooks of bias"),
}


@pytest.mark.parametrize(("change", "named"), CHANGES.values(), ids=list(CHANGES))
def test_change_is_refused_until_it_is_recorded(model, change, named):
    linear = model.layers[1].linear
    linear.register_buffer("count", torch.zeros(1).cuda())
    record(model)
    model(batch(1)).sum().backward()
    create_cudagraphs()
    change(linear)
    with pytest.raises(RuntimeError, match=rf"changed since capture: {named} of layer 2 .*delete_cuda_graphs\(\)"):
        model(batch(2))
    delete_cuda_graphs()
    linear.bias._backward_hooks = None
    record(model)
    model(batch(2)).sum().backward()


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (
            lambda linear: linear.weight.register_hook,
            r"has a hook \(register_hook\), but a CUDA graph would pass it no g",
        ),
        (lambda linear: linear.register_forward_pre_hook, "Linear has a forward-pre hook"),
    ],
)
def test_hook_is_refused_at_capture(model, register, message):
    register(model.layers[0].linear)(lambda *given: None)
    with pytest.raises(RuntimeError, match=message):
        record(model)


@pytest.mark.parametrize(
    ("field", "attribute"),
    [
        ("moe_enable_routing_replay", "router_replay"),
        ("qk_clip", "current_max_attn_logits"),
        ("log_max_attention_logit", "current_max_attn_logits"),
        ("experimental_attention_variant", "indexer"),
    ],
)
def test_python_code_of_training_passes_is_refused(field, attribute):
    model = stack(count=1, **{field: True})
    record(model)
    delete_cuda_graphs()
    setattr(model.layers[0].linear, attribute, None)
    with torch.no_grad():
        model(batch(0))
    with pytest.raises(UnsupportedError, match=f"{field} needs Python code"):
        model(batch(0))
    model.layers[0].cudagraph_manager.func = model.layers[0].forward
    with nullcontext() if attribute != "router_replay" else pytest.raises(UnsupportedError):
        model(batch(0))


def test_hooks_in_graphs_are_logged(model, caplog):
    def of_ddp(*given):
        return None

    of_ddp.__module__ = "megatron.core.distributed.distributed_data_parallel"
    model.layers[0].register_forward_pre_hook(of_ddp)
    model.layers[1].register_forward_hook(lambda *given: None)
    record(model)
    assert "hooks of layer 2 (Layer) are part of CUDA graphs" in caplog.text


def test_new_buffer_is_accepted(model):
    model.layers[0].linear.register_buffer("cache", None)
    record(model)
    model.layers[0].linear.cache = torch.zeros(2).cuda()
    model(batch(1)).sum().backward()


def test_attribute_changed_by_passes_is_refused(model):
    linear = model.layers[0].linear
    linear.forward = lambda x, forward=linear.forward: forward(x)
    model.layers[0].passes = 0
    model.layers[0].register_forward_hook(lambda layer, *_: setattr(layer, "passes", layer.passes + 1))
    with pytest.raises(RuntimeError, match="each forward pass changes passes of Layer"):
        record(model)
