"""AttributeReads beside torch.compile: what was compiled before is used, and what it reads is known."""

from unittest import mock

import pytest
import torch

from megatron.core.transformer._cuda_graphs.attribute_reads import AttributeReads, is_third_party
from megatron.core.transformer._cuda_graphs.errors import UnsupportedError
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
    conditions = ReplayConditions(router, noted(router))
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


class Stateful(torch.nn.Module):
    """A module of a user's, which does something with its attributes in each pass."""

    def __init__(self, act):
        super().__init__()
        self.act, self.count, self._calls, self.cache, self.last = act, 0, [], None, None
        self.seen, self.mean = {"passes": 0}, torch.zeros(())
        self.register_buffer("running", torch.zeros(2))

    def forward(self, x):
        self.act(self, x)
        return x


def counts(module, x):
    module.count += 1


def lists_its_calls(module, x):
    module._calls.append(x.mean())


def counts_in_a_dictionary(module, x):
    module.seen["passes"] += 1


def averages(module, x):
    module.mean = module.mean * 0.9 + x.mean() * 0.1


def replaces_a_buffer(module, x):
    module.running = module.running * 0.9 + x * 0.1


def keeps_a_result(module, x):
    module.last = x.mean()
    module.seen["passes"] = module.last


def hands_over(module, x):
    assert module.cache is None
    module.cache = x
    module.cache = None


def changes_a_buffer_in_place(module, x):
    module.running.mul_(0.9).add_(x)
    module.running += x


def pass_of(module, recorded=True):
    """Run ``module`` once, as if its pass was recorded."""
    with (
        AttributeReads().noted([module], stateless=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=recorded),
    ):
        module(torch.ones(2))


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (counts, "count of Stateful"),
        (lists_its_calls, "_calls of Stateful"),
        (counts_in_a_dictionary, "seen of Stateful"),
        (averages, "mean of Stateful"),
        (replaces_a_buffer, "running of Stateful"),
    ],
)
def test_what_a_recorded_pass_leaves_for_the_next_one_is_refused(act, name):
    with pytest.raises(UnsupportedError, match=f"reads and changes {name}"):
        pass_of(Stateful(act))


def test_what_derives_from_transformer_engine_is_not_refused():
    """Its modules set flags of theirs from pass to pass, and graphs of them are made with that in mind."""

    class Linear(torch.nn.Module):
        __module__ = "transformer_engine.pytorch.module.linear"

    class OfAUser(Stateful, Linear):
        pass

    module = OfAUser(counts)
    pass_of(module)
    assert module.count == 1


def test_a_package_beside_megatron_core_counts_as_a_users():
    """Megatron-Bridge's adapters are in ``megatron.bridge``."""
    assert is_third_party(type("Alone", (torch.nn.Module,), {"__module__": "megatron.bridge.peft.lora"}))
    assert not is_third_party(type("Core", (torch.nn.Module,), {"__module__": "megatron.core.transformer.mlp"}))
    assert not is_third_party(type("Training", (torch.nn.Module,), {"__module__": "megatron.training"}))


@pytest.mark.parametrize("act", [keeps_a_result, hands_over, changes_a_buffer_in_place])
def test_what_no_other_pass_reads_and_what_replays_change_too_is_not_refused(act):
    module = Stateful(act)
    pass_of(module, recorded=False)
    pass_of(module)


def test_what_passes_set_up_once_is_not_refused():
    def sets_up(module, x):
        if module.cache is None:
            module.cache = x * 2

    module = Stateful(sets_up)
    pass_of(module, recorded=False)
    pass_of(module)


@pytest.mark.parametrize("act", [counts, lists_its_calls, counts_in_a_dictionary, averages])
def test_after_a_refusal_attributes_are_as_they_were(act):
    module = Stateful(act)
    calls, seen = module._calls, module.seen
    with pytest.raises(UnsupportedError):
        pass_of(module)
    assert (module.count, module._calls, module.seen, module.mean.item()) == (0, [], {"passes": 0}, 0)
    assert (module._calls, module.seen) == (calls, seen)
    assert module._calls is calls and module.seen is seen
