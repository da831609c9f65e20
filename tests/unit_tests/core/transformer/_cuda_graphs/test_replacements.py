"""Test temporary replacements of attributes."""

import pytest
import torch

from megatron.core.transformer._cuda_graphs.replacements import Replacements, replaced_attribute


def former(*args: object) -> str:
    return "former"


def test_class_attribute_is_not_left_on_the_object():
    module = torch.nn.Linear(2, 2)
    with replaced_attribute([module], "forward", lambda forward: former):
        assert module(torch.zeros(2)) == "former"
    assert "forward" not in vars(module)
    assert module(torch.zeros(2)).shape == (2,)


def test_replacement_module_is_not_registered():
    module, child = torch.nn.Module(), torch.nn.Linear(2, 2)
    with replaced_attribute([module], "dump_patches", lambda value: child):
        assert list(module.children()) == []


@pytest.mark.parametrize("grad", [None, torch.ones(2)])
def test_tensor_gradient_is_restored(grad):
    tensor = torch.zeros(2, requires_grad=True)
    tensor.grad = grad
    with replaced_attribute([tensor], "grad", lambda former: torch.zeros(2)):
        assert tensor.grad.tolist() == [0, 0]
    assert tensor.grad is grad


def test_classes_keep_inherited_attributes():
    class Base:
        def name(self):
            return "base"

    class Derived(Base):
        pass

    replacements = Replacements()
    for kind in (Base, Derived):
        replacements.add(kind, "name", lambda self: "other")
    before = vars(Base)["name"]
    with replacements:
        assert Derived().name() == Base().name() == "other"
    assert "name" not in vars(Derived)
    assert vars(Base)["name"] is before
