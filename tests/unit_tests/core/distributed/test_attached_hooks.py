"""Test that autograd calls the handlers that Megatron-FSDP attaches around a module."""

import pytest
import torch

from .test_unfinished_backward import built

OTHERS = [None, 2, "causal", torch.arange(3)]


@pytest.fixture
def hooks(one_rank):
    return built("optim_grads_params").fsdp.fsdp_hooks


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (lambda x: (x, *OTHERS), lambda x: {}),
        (lambda x: (), lambda x: {"hidden_states": x, "mask": OTHERS[3], "context": None}),
        (lambda x: ({"hidden_states": [x, OTHERS[3]]},), lambda x: {"context": None}),
        (lambda x: (None,), lambda x: {"states": (OTHERS[3], {"inner": x})}),
    ],
    ids=["arguments", "named arguments", "a dictionary", "a nested named argument"],
)
def test_handler_runs_after_backward_of_a_module(hooks, args, kwargs):
    ran: list = []
    module, x = torch.nn.Linear(3, 3), torch.ones(3, requires_grad=True)
    torch.nn.init.constant_(module.weight, 2.0)  # sums are exact in any order
    given_args, given_kwargs = args(x), kwargs(x)
    new_args, new_kwargs = hooks.attach_after_backward(ran.append, module, given_args, given_kwargs)

    flat = torch.utils._pytree.tree_leaves
    assert torch.utils._pytree.tree_structure((new_args, new_kwargs)) == torch.utils._pytree.tree_structure(
        (given_args, given_kwargs)
    )
    pairs = list(zip(flat((new_args, new_kwargs)), flat((given_args, given_kwargs)), strict=True))
    assert all(new is old for new, old in pairs if old is not x)
    (replaced,) = (new for new, old in pairs if old is x)
    assert replaced is not x

    (module(replaced).sum() + replaced.sum()).backward()
    assert ran == [module]
    assert x.grad.tolist() == [1 + 3 * 2.0] * 3


def test_no_handler_without_an_input_gradient(hooks):
    assert hooks.attach_after_backward(print, torch.nn.Linear(3, 3), (torch.ones(3), None), {"scale": 2.0}) is None


@pytest.mark.parametrize(
    "output", [lambda y: y, lambda y: (y, None), lambda y: (y, {"aux": y})], ids=["a tensor", "a pair", "nested"]
)
def test_handler_runs_before_backward_of_a_module(hooks, output):
    ran: list = []
    module, x = torch.nn.Linear(3, 3), torch.ones(3, requires_grad=True)
    x.register_hook(lambda grad: ran.append("input"))
    given = output(module(x))
    new = hooks.attach_before_backward(lambda module, grads: ran.append(module), module, (x,), given)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(new) if leaf is not None]
    assert torch.utils._pytree.tree_structure(new) == torch.utils._pytree.tree_structure(given)
    assert all(leaf is not y for leaf in leaves for y in torch.utils._pytree.tree_leaves(given))
    leaves[0].sum().backward()
    assert ran == [module, "input"]
