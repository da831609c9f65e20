"""connected_leaves: which leaves outputs were computed from."""

import torch

from megatron.core.transformer._cuda_graphs.engine.connected_leaves import connected_leaves


def leaf():
    return torch.ones(2, requires_grad=True)


def test_every_leaf_behind_an_output_is_found_once():
    one, two, unused, plain = leaf(), leaf(), leaf(), torch.ones(2)
    found = connected_leaves([one * two + one, (two * plain).sum()])
    assert {id(tensor) for tensor in found} == {id(one), id(two)}
    assert len(found) == 2
    assert unused.grad is None


def test_an_output_may_be_a_leaf_itself():
    one, plain = leaf(), torch.ones(2)
    assert connected_leaves([one, plain]) == [one]


def test_what_is_detached_is_not_connected():
    assert connected_leaves([leaf().detach() * 2]) == []


def test_a_search_ends_at_the_tensors_where_backward_ends():
    leaf, inside = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    middle = leaf * 2
    assert connected_leaves([middle * inside], stops=[middle])[0] is inside
    assert len(connected_leaves([middle * inside], stops=[middle])) == 1
    assert connected_leaves([middle], stops=[middle]) == []
