"""Tests that ``set_current_microbatch`` sets the micro-batch on all layers that may replay."""

from itertools import pairwise
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from megatron.core.transformer.cuda_graphs import set_current_microbatch
from tests.support.replaced import replaced


class Layer:
    """A layer without a current micro-batch."""

    current_microbatch: int | None = None


def stack(count):
    return SimpleNamespace(layers=[Layer() for _ in range(count)])


def microbatches(layers):
    return [layer.current_microbatch for layer in layers]


def test_hybrid_mtp_layers_have_their_micro_batch():
    mtp = SimpleNamespace(layers=[SimpleNamespace(mtp_model_layer=stack(2)) for _ in range(2)])
    model = SimpleNamespace(decoder=stack(2), mtp=mtp)
    set_current_microbatch(model, 3)
    assert [microbatches(layer.mtp_model_layer.layers) for layer in model.mtp.layers] == [[3, 3], [3, 3]]


ABSENT = "absent"


@st.composite
def chunks(draw):
    """Draw a factory of equal chunks with random parts and wrappers."""
    parts = {
        "decoder": draw(st.sampled_from([ABSENT, None, 0, 2])),
        "mtp": draw(st.sampled_from([ABSENT, 0, 2])),
        "vision_model": draw(st.sampled_from([ABSENT, None, "no decoder", "no layers", 0, 2])),
    }
    depths = {name: draw(st.integers(0, 2)) for name in ("decoder", "vision_model")}
    depths["mtp"] = depths["decoder"]

    def make():
        layers: list[Layer] = []

        def new_stack(count):
            made = stack(count)
            layers.extend(made.layers)
            return made

        def part(name):
            value = parts[name]
            if value is None:
                return None
            if name == "decoder":
                return new_stack(value)
            if name == "mtp":
                rows = [SimpleNamespace(mtp_model_layer=layer) for layer in new_stack(value).layers]
                return SimpleNamespace(layers=rows)
            if value == "no decoder":
                return SimpleNamespace()
            return SimpleNamespace(decoder=SimpleNamespace() if value == "no layers" else new_stack(value))

        levels = [
            SimpleNamespace(
                **{name: part(name) for name in parts if parts[name] is not ABSENT and depths[name] == depth}
            )
            for depth in range(3)
        ]
        for outer, inner in pairwise(levels):
            outer.module = inner
        return levels[0], layers

    return make


@given(chunks(), st.integers(0, 7))
def test_same_layers_are_set_as_by_megatron_core(make, microbatch):
    (chunk, layers), (their_chunk, their_layers) = make(), make()
    set_current_microbatch(chunk, microbatch)
    replaced("megatron.core.transformer.cuda_graphs").set_current_microbatch(their_chunk, microbatch)
    assert microbatches(layers) == microbatches(their_layers)
