"""consecutive_layers: which layers are recorded in one graph."""

from functools import partial

import pytest
import torch

from megatron.core.transformer._cuda_graphs.hooks import BACKWARD_HANDLER, runs_outside_graphs
from megatron.core.transformer._cuda_graphs.te.consecutive_layers import consecutive, with_hooks_of_others


def decoder(count=6):
    return [torch.nn.Identity() for _ in range(count)]


def pieces(layers, captured=None, kwargs=None, most=100):
    captured = layers if captured is None else captured
    found = consecutive(layers, captured, kwargs or [{}] * len(captured), most, with_hooks_of_others(captured))
    return [list(piece) for piece in found]


def test_all_layers_follow_each_other():
    assert pieces(decoder()) == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("count", [0, 1])
def test_a_layer_alone_is_no_piece(count):
    assert pieces(decoder(count)) == []


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, []),
        (2, [[0, 1], [2, 3], [4, 5]]),
        (4, [[0, 1, 2, 3], [4, 5]]),
        (5, [[0, 1, 2, 3, 4]]),
        (100, [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_a_piece_has_a_limit(most, expected):
    assert pieces(decoder(), most=most) == expected


def test_a_layer_that_is_not_captured_divides_those_around_it():
    layers = decoder()
    assert pieces(layers, [*layers[:2], *layers[3:]]) == [[0, 1], [2, 3, 4]]
    assert pieces(layers, layers[::2]) == []


def test_layers_outside_of_the_decoder_stay_alone():
    layers = decoder(3)
    assert pieces(layers, [*layers, torch.nn.Identity()]) == [[0, 1, 2]]


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_a_layer_with_a_hook_of_the_users_stays_alone(kind):
    layers = decoder()
    getattr(layers[2], f"register_{kind}")(lambda *_: None)
    assert pieces(layers) == [[0, 1], [3, 4, 5]]


def test_hooks_of_megatron_fsdp_are_recorded_with_the_layers():
    layers = decoder(2)

    @runs_outside_graphs
    def unshard(*_):
        pass

    wrapper = partial(unshard)
    setattr(wrapper, BACKWARD_HANDLER, unshard)
    for layer in layers:
        layer.register_forward_pre_hook(unshard)
        layer.register_forward_hook(partial(unshard))
        layer.register_forward_pre_hook(wrapper)
    assert pieces(layers) == [[0, 1]]


@pytest.mark.parametrize(
    "other", [{"mask": torch.zeros(3)}, {"mask": torch.zeros(2, dtype=torch.int)}, {"other": torch.zeros(2)}]
)
def test_layers_that_take_other_keyword_inputs_do_not_follow_each_other(other):
    kwargs = [{"mask": torch.zeros(2)}, {"mask": torch.ones(2)}, other, other]
    assert pieces(decoder(4), kwargs=kwargs) == [[0, 1], [2, 3]]


def test_layers_without_the_keyword_inputs_of_the_first_follow_it():
    mask = {"mask": torch.zeros(2)}
    assert pieces(decoder(5), kwargs=[mask, {}, mask, {}, {}]) == [[0, 1, 2, 3, 4]]
    assert pieces(decoder(5), kwargs=[{}, {}, mask, {}, mask]) == [[0, 1], [2, 3, 4]]
