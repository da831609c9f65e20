"""AttributeReads beside torch.compile: what was compiled before is used, and what it reads is known."""

import pytest
import torch

from megatron.core.transformer._cuda_graphs.attribute_reads import AttributeReads
from megatron.core.transformer._cuda_graphs.replay_conditions import ReplayConditions

COMPILED: list[torch.fx.GraphModule] = []


def counting(graph, inputs):
    """A backend that runs what it is given."""
    COMPILED.append(graph)
    return graph.forward


class Config:
    def __init__(self):
        self.scale, self.unread = 2.0, 1


class Router(torch.nn.Module):
    """As megatron-core's: one of its methods is compiled."""

    def __init__(self):
        super().__init__()
        self.config, self.bias, self.unread, self.calls = Config(), 1.0, 1, 0
        self.norm = torch.nn.Dropout(0.0)

    def forward(self, x):
        return self.biased(x) * 2

    @torch.compile(backend=counting)
    def biased(self, x):
        self.calls = 1
        return self.norm(x * self.config.scale) + self.amount()

    def amount(self):
        return self.bias


@pytest.fixture
def compiled():
    """The list of what was compiled, empty."""
    torch._dynamo.reset()
    COMPILED.clear()
    yield COMPILED
    torch._dynamo.reset()


def noted(router):
    reads, x = AttributeReads(), torch.arange(4.0)
    with reads.noted([router]):
        found = router(x)
    assert torch.equal(router(x), found)
    return reads


def test_what_is_compiled_while_reads_are_noted_is_used_later(compiled):
    noted(Router())
    assert len(compiled) == 1


def other_scale(router):
    router.config.scale = 3.0


def other_bias(router):
    router.bias = 0.5


def other_dropout(router):
    router.norm.p = 0.5


@pytest.mark.parametrize("change", [other_scale, other_bias, other_dropout])
@pytest.mark.parametrize("whole", [False, True])
def test_what_compiled_code_reads_is_compared(compiled, change, whole):
    router = Router()
    if whole:
        router.compile(backend=counting)
    conditions = ReplayConditions([router], noted(router), [router])
    assert not conditions.have_changed()
    router.unread = router.config.unread = router.calls = 7
    assert not conditions.have_changed()
    change(router)
    assert conditions.have_changed()


def test_a_compiled_module_in_another_is_used(compiled):
    outer = torch.nn.Sequential(Router())
    outer[0].compile(backend=counting)
    reads = noted(outer)
    assert len(compiled) == 1
    assert reads.ran(outer[0].norm)


def test_classes_and_modules_are_as_before(compiled):
    router, own = Router(), dict(vars(Router))
    router.compile(backend=counting)
    before = dict(vars(router))
    with AttributeReads().noted([router]):
        assert vars(Router) != own
    assert (dict(vars(Router)), dict(vars(router))) == (own, before)
    assert "__getattribute__" not in vars(torch.nn.Module)
