"""dispatcher_state: an eager pass leaves a token dispatcher as it was."""

from types import SimpleNamespace

import pytest

from megatron.core.transformer._cuda_graphs.dispatcher_state import DispatcherState


def test_attributes_are_what_they_were_after_a_pass():
    dispatcher = SimpleNamespace(hidden_shape=(8, 2), capacity=None)
    with DispatcherState(SimpleNamespace(mlp=SimpleNamespace(token_dispatcher=dispatcher))):
        dispatcher.hidden_shape, dispatcher.capacity, dispatcher.probs = (4, 2), 3, "probs"
    assert vars(dispatcher) == {"hidden_shape": (8, 2), "capacity": None}


def test_so_they_are_after_an_exception():
    dispatcher = SimpleNamespace(hidden_shape=(8, 2))
    layer = SimpleNamespace(mlp=SimpleNamespace(token_dispatcher=dispatcher))

    def fail():
        with DispatcherState(layer):
            dispatcher.hidden_shape = None
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert dispatcher.hidden_shape == (8, 2)


@pytest.mark.parametrize("layer", [SimpleNamespace(), SimpleNamespace(mlp=SimpleNamespace())], ids=["no MLP", "dense"])
def test_a_layer_without_a_dispatcher_just_runs(layer):
    with DispatcherState(layer):
        pass
