"""Sinks of graphed units: which gradients they take. What nobody uses counts as zeros."""

import pytest
import torch

from ..fsdp_variants import Variant, small


@pytest.fixture
def fsdp(ranks):
    return Variant(small()).build(graphs=True).module


def taken(fsdp, *, whole=True, unused=()):
    """The names of the parameters of the first layer whose gradients its sink takes in a capture."""
    layer = fsdp.module.decoder.layers[0]
    with fsdp.graphs.capture_graphs([layer]):
        (sink,) = fsdp.graphs.gradient_sinks([layer], whole)
        fsdp.fsdp_hooks.unshard_for_backward(layer)
        names, params = zip(*layer.named_parameters(), strict=True)
        grads = [
            None if name in unused else torch.full_like(param, 5.0) for name, param in zip(names, params, strict=True)
        ]
        left = sink.take(params, grads)
        values = {}
        for name, param, grad, back in zip(names, params, grads, left, strict=True):
            if getattr(param, "main_grad", None) is None:
                assert back is grad
            else:
                assert back is None
                values[name] = param.main_grad.unique().item()
        fsdp.fsdp_hooks.release_after_backward(layer)
    assert values == {name: 0.0 if name in unused else 5.0 for name in values}
    return set(values)


FC1 = "mlp.linear_fc1.weight"


def test_gradients_are_taken_in_a_capture_only(fsdp):
    with pytest.raises(RuntimeError, match="call it in capture_graphs"):
        fsdp.graphs.gradient_sinks(fsdp.module.decoder.layers, whole=True)


def test_a_sink_takes_every_gradient(fsdp):
    assert taken(fsdp) == {name for name, _ in fsdp.module.decoder.layers[0].named_parameters()}


@pytest.mark.parametrize("mark", ["skip_backward_post_hook", "_is_shared"])
def test_gradients_that_are_completed_elsewhere_are_left_to_autograd(fsdp, mark):
    fsdp._replace_param_with_raw_if_needed()
    everything = taken(fsdp)
    setattr(fsdp.module.decoder.layers[0].get_parameter(FC1), mark, True)
    assert taken(fsdp) == everything - {FC1}


@pytest.mark.parametrize(
    ("mark", "reason"),
    [
        ("skip_backward_post_hook", "the weight gradient of {} is delayed"),
        ("_is_shared", "the gradient of {} is completed elsewhere"),
    ],
)
def test_layers_with_such_gradients_are_not_recorded_with_their_collectives(fsdp, mark, reason):
    layers = list(fsdp.module.decoder.layers)
    fsdp._replace_param_with_raw_if_needed()
    assert fsdp.graphs.recording_blocker(layers) == ""
    setattr(layers[1].get_parameter(FC1), mark, True)
    assert fsdp.graphs.recording_blocker(layers) == reason.format(f"decoder.layers.1.{FC1}")


@pytest.mark.parametrize("whole", [True, False])
def test_the_gradient_of_an_unused_parameter_is_zero_if_the_graph_holds_the_whole_layer(fsdp, whole):
    everything = {name for name, _ in fsdp.module.decoder.layers[0].named_parameters()}
    assert taken(fsdp, whole=whole, unused={FC1}) == (everything if whole else everything - {FC1})
