"""Test that ``set_current_microbatch`` sets the micro-batch on all layers that may replay."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from megatron.core.transformer.cuda_graphs import set_current_microbatch
from tests.support.replaced import replaced


@dataclass
class Layer:
    """A layer with only the attribute that ``set_current_microbatch`` sets."""

    current_microbatch: int | None = None


def stack():
    return SimpleNamespace(layers=[Layer(), Layer()])


PARTS = {
    "decoder": stack,
    "mtp": lambda: SimpleNamespace(layers=[SimpleNamespace(mtp_model_layer=layer) for layer in stack().layers]),
    "vision_model": lambda: SimpleNamespace(decoder=stack()),
}


def chunk(names, wrappers):
    made = SimpleNamespace(**{name: PARTS[name]() for name in names})
    for _ in range(wrappers):
        made = SimpleNamespace(module=made)
    return made


def test_hybrid_mtp_layers_have_their_micro_batch():
    mtp = SimpleNamespace(layers=[SimpleNamespace(mtp_model_layer=stack()) for _ in range(2)])
    model = SimpleNamespace(decoder=stack(), mtp=mtp)
    set_current_microbatch(model, 3)
    assert [layer.mtp_model_layer.layers for layer in model.mtp.layers] == [[Layer(3), Layer(3)]] * 2


@pytest.mark.parametrize("wrappers", [0, 2])
@pytest.mark.parametrize("names", [(), ("decoder",), ("decoder", "mtp"), ("vision_model",), (*PARTS,)], ids=str)
def test_same_layers_are_set_as_by_megatron_core(names, wrappers):
    ours, theirs = (chunk(names, wrappers) for _ in range(2))
    set_current_microbatch(ours, 3)
    replaced("megatron.core.transformer.cuda_graphs").set_current_microbatch(theirs, 3)
    assert ours == theirs
    assert (ours != chunk(names, wrappers)) == bool(names)
