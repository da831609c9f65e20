"""Test decoders that read hidden states between layers, skip layers, or reorder them.

A step with graphs is bit-identical to an eager step or raises an error. The next step is unaffected.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.transformer.transformer_layer import TransformerLayer

from .captured_training import CapturedTraining, compared
from .fsdp_variants import Variant, small

pytestmark = pytest.mark.sampled

MODEL, ONE = "model", "layer"  # scope of a graph
COUNT = 4
IN_ORDER = (0, 1, 2, 3)


def unusual(model):
    """Add the class attributes ``called`` and ``reads``, lists of layer indices, to the decoder.

    The decoder calls only the layers in ``called``. To its output it adds the cosine of the output of each layer in
    ``reads``.
    """

    own_kind: Any = type(model.decoder)

    class Unusual(own_kind):
        called, reads = IN_ORDER, ()

        def forward(self, *args, **kwargs):
            layers = self._modules["layers"]
            self._modules["layers"] = [layers[index] for index in self.called]
            try:
                output = super().forward(*args, **kwargs, extract_layer_indices=set(self.reads))
            finally:
                self._modules["layers"] = layers
            if not self.reads:
                return output
            output, between = output
            return output + sum(hidden.cos() for hidden in between)

    model.decoder.__class__ = Unusual


def trained(per_graph, called, reads, error=None):
    """Train an unusual step and then a normal step, and return the trace.

    Args:
        per_graph: Scope of the graphs, or None for eager training.
        called: Indices of the layers that the unusual step calls.
        reads: Indices of the layers whose outputs the unusual step reads.
        error: Message of the error that the unusual step must raise, if any.
    """
    case = small(layers=COUNT, holds=per_graph or MODEL, warmup=10, microbatches=2)
    training = CapturedTraining(case, per_graph is not None, Variant(case, change=unusual))
    try:
        kind = type(training.fsdp.module.decoder)
        kind.called, kind.reads = called, reads
        if error is None:
            training.step()
        else:
            with pytest.raises(RuntimeError, match=error):
                training.step()
        kind.called, kind.reads = IN_ORDER, ()
        training.step()
        return training.trace()
    finally:
        training.delete()


eager = functools.cache(functools.partial(trained, None))


@pytest.mark.parametrize(
    ("per_graph", "called", "reads", "replays"),
    [
        (ONE, IN_ORDER, (1, 2), 16),
        (ONE, (0, 2, 3), (1,), 12),
        (ONE, (1, 3), (), 8),
    ],
)
def test_supported_layer_orders_are_bit_identical(one_rank, per_graph, called, reads, replays):
    got = trained(per_graph, called, reads)
    assert eager(called, reads).differences(got) == []
    assert got.step_replays[1:] == [replays, 4 * COUNT]


def test_unsupported_layer_order_names_the_layer(one_rank):
    error = "layer 3 .*: a later replay has overwritten the activations of this backward pass"
    got = trained(ONE, (0, 2, 1, 3), (), error)
    assert got.step_replays[-1] == 4 * COUNT
    expected = eager(IN_ORDER, ())  # includes one more step
    assert (got.losses, got.grad_norms) == (expected.losses[:2], expected.grad_norms[:2])


def negated(forward):
    """Wrap ``forward`` of a layer or decoder to negate its output."""

    @functools.wraps(forward)
    def call(*args, **kwargs):
        output = forward(*args, **kwargs)
        return -output if torch.is_tensor(output) else (-output[0], *output[1:])

    return call


@pytest.mark.parametrize("replaced", ["instance", "subclass", "class"])
def test_layer_that_replaces_forward_runs_in_model_graphs_only(one_rank, monkeypatch, replaced):
    def negate(model):
        layer = model.decoder.layers[1]
        if replaced == "instance":
            layer.forward = negated(layer.forward)
        elif replaced == "class":
            monkeypatch.setattr(TransformerLayer, "forward", negated(original))
        else:
            layer.__class__ = type("Negated", (TransformerLayer,), {"forward": negated(original)})

    original = TransformerLayer.forward
    case = small(layers=COUNT, holds=MODEL, warmup=10)
    assert compared(case, variant=Variant(case, change=negate)).replays
    case = replace(case, holds=ONE)
    with pytest.raises(RuntimeError, match=r"layer \d \(.*\) replaces forward"):
        CapturedTraining(case, variant=Variant(case, change=negate))
