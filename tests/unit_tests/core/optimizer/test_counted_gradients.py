"""Which gradients count in the norm is asked once."""

from types import SimpleNamespace

import pytest
import torch


def param(grad, name="grad"):
    return SimpleNamespace(**{name: grad})


def distributed(tensor):
    return SimpleNamespace(_local_tensor=tensor)


@pytest.fixture
def counted_gradients():
    from megatron.core.optimizer.counted_gradients import CountedGradients

    return CountedGradients


@pytest.mark.parametrize("name", ["grad", "decoupled_grad"])
def test_the_same_parameters_have_their_new_gradients_counted(counted_gradients, name):
    tensors = [torch.zeros(1) for _ in range(3)]
    params = [param(distributed(tensors[0]), name), param(None, name), param(tensors[1], name), param(tensors[2], name)]
    counted = counted_gradients(params, name, [tensors[0], tensors[2]])
    new = torch.ones(1)
    setattr(params[0], name, distributed(new))
    grads = counted.of(list(params))
    assert [id(grad) for grad in grads] == [id(new), id(tensors[2])]


@pytest.mark.parametrize("change", ["fewer", "other", "lost", "gained"])
def test_what_changed_is_noticed(counted_gradients, change):
    tensors = [torch.zeros(1) for _ in range(3)]
    params = [param(tensors[0]), param(None), param(tensors[1])]
    counted = counted_gradients(params, "grad", [tensors[0]])
    assert counted.of(params) is not None
    if change == "fewer":
        params = params[:2]
    elif change == "other":
        params = [param(tensors[0]), *params[1:]]
    elif change == "lost":
        params[2].grad = None
    else:
        params[1].grad = tensors[2]
    assert counted.of(params) is None
