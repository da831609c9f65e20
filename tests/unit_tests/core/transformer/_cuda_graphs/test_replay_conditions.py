"""ReplayConditions: changes of modules are noticed, and named."""

from argparse import Namespace
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.transformer._cuda_graphs.attribute_reads import AttributeReads
from megatron.core.transformer._cuda_graphs.replay_conditions import ReplayConditions
from megatron.training import get_args, global_vars


class Config:
    """A configuration; its class is Python's."""

    def __init__(self):
        self.scale = 2.0
        self.unread = 1


@dataclass
class Deeper:
    slope: float = 0.0


@dataclass
class Flags:
    shift: float = 0.0
    unread: int = 1
    deeper: Deeper = field(default_factory=Deeper)


class Routing:
    """Stands for what gives a router its experts (``--moe-enable-routing-replay``)."""

    action = ""


class Base(torch.nn.Module):
    def amount(self):
        return 0.0


class Inner(Base):
    def __init__(self, config):
        super().__init__()
        self.mixed, self.many, self.recent = {"low": 0.0, "act": torch.tanh}, [Deeper()], deque([0.0])
        self.on_device, self.router_replay = torch.zeros(2), Routing()
        self.router_replay.action = "record"
        self.config, self.bias, self._offset = config, 1.0, 0.0
        self.limits, self.options, self.flags = {"low": [0.0]}, SimpleNamespace(low=0.0), Flags()
        self.on_host, self.results = torch.tensor(1.0), []
        self.tables, self.by_length = [torch.zeros(2), torch.zeros(1)], {2: torch.zeros(2)}
        self.dropout = torch.nn.Dropout(0.0)
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x):
        return self.dropout(x * self.config.scale + self.amount() + self.shift)

    def amount(self):
        self.results.append(torch.ones(2))
        absent = getattr(self, "extra", 0.0) + getattr(self.config, "extra", 0.0)
        data = self.limits["low"][0] + self.options.low + self.flags.shift + self.tables[0] + self.by_length[2]
        more = self.mixed["low"] + self.many[0].slope + self.flags.deeper.slope + self.recent[0] + self.on_device
        more = more + super().amount() + len(self.router_replay.action)
        return self.bias * self.on_host + self._offset + data + absent + more


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        config = Config()
        self.linear, self.inner, self.unused = torch.nn.Linear(2, 2), Inner(config), Inner(config)

    def forward(self, x):
        return self.inner(self.linear(x))


@pytest.fixture
def outer():
    return Outer()


def noted(outer):
    """Return the conditions of a forward pass of ``outer``."""
    reads = AttributeReads()
    with reads.noted([outer]):
        outer(torch.ones(2))
    return ReplayConditions(outer, reads, "layer 3", buffers=True)


@pytest.fixture
def conditions(outer):
    return noted(outer)


def other_forward(outer):
    outer.inner.forward = lambda x: x


def other_method(outer):
    outer.inner.amount = lambda: 5.0


CHANGES = {
    "training of layer 3.inner.dropout": lambda outer: outer.inner.dropout.eval(),
    "p of layer 3.inner.dropout": lambda outer: setattr(outer.inner.dropout, "p", 0.5),
    "bias of layer 3.inner": lambda outer: setattr(outer.inner, "bias", torch.ones(3)),
    "scale of the configuration": lambda outer: setattr(outer.inner.config, "scale", 3.0),
    "limits of layer 3.inner": lambda outer: outer.inner.limits["low"].append(1.0),
    "options of layer 3.inner": lambda outer: setattr(outer.inner.options, "low", 1.0),
    "shift of Flags": lambda outer: setattr(outer.inner.flags, "shift", 1.0),
    "_offset of layer 3.inner": lambda outer: setattr(outer.inner, "_offset", 1.0),
    "on_host of layer 3.inner": lambda outer: outer.inner.on_host.fill_(2.0),
    "tables of layer 3.inner": lambda outer: outer.inner.tables.__setitem__(1, torch.zeros(1)),
    "by_length of layer 3.inner": lambda outer: outer.inner.by_length.update({2: torch.zeros(2)}),
    "mixed of layer 3.inner": lambda outer: outer.inner.mixed.update(low=1.0),
    "action of Routing": lambda outer: setattr(outer.inner.router_replay, "action", "replay"),
    "slope of Deeper": lambda outer: setattr(outer.inner.many[0], "slope", 1.0),
    "recent of layer 3.inner": lambda outer: outer.inner.recent.append(1.0),
    "flags of layer 3.inner": lambda outer: setattr(outer.inner, "flags", replace(outer.inner.flags)),
    "the memory of on_device of layer 3.inner": lambda outer: setattr(outer.inner.on_device, "data", torch.zeros(2)),
    "the memory of shift of layer 3.inner": lambda outer: setattr(outer.inner.shift, "data", torch.zeros(2)),
    "what was compiled of layer 3.linear": lambda outer: setattr(outer.linear, "_compiled_call_impl", abs),
    "extra of layer 3.inner": lambda outer: setattr(outer.inner, "extra", 1.0),
    "extra of the configuration": lambda outer: setattr(outer.inner.config, "extra", 1.0),
    "forward of layer 3.inner": other_forward,
    "amount of layer 3.inner": other_method,
    "the class of layer 3.inner": lambda outer: setattr(outer.inner, "__class__", type("Other", (Inner,), {})),
    "the modules in layer 3": lambda outer: setattr(outer, "linear", torch.nn.Linear(2, 2)),
    "the parameters of layer 3.linear": lambda outer: setattr(
        outer.linear, "weight", torch.nn.Parameter(outer.linear.weight.detach())
    ),
    "the buffers of layer 3.inner": lambda outer: setattr(outer.inner, "shift", torch.zeros(2)),
    "requires_grad of layer 3.linear.bias": lambda outer: outer.linear.bias.requires_grad_(False),
    "hooks of layer 3.linear.bias": lambda outer: outer.linear.bias.register_hook(lambda grad: None),
    "hooks of layer 3.linear": lambda outer: outer.linear.register_forward_hook(lambda *call: None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_and_named(outer, conditions, name):
    assert not conditions.have_changed()
    CHANGES[name](outer)
    assert conditions.have_changed()
    assert name in conditions.changes()


def test_a_change_of_what_options_hold_is_noticed(outer, conditions):
    outer.inner.flags.deeper.slope = 1.0
    assert conditions.have_changed()
    assert "slope of Deeper" in conditions.changes()


def test_what_holds_itself_is_compared_as_one_object(outer):
    outer.inner.mixed["self"], outer.inner.many = outer.inner.mixed, [*outer.inner.many, outer.inner.many]
    outer.inner.options.own = outer.inner.options
    outer.inner.many.append(outer.inner.many)
    reads = AttributeReads()
    with reads.noted([outer]):
        outer(torch.ones(2))
    conditions = ReplayConditions(outer, reads, "layer 3")
    assert not conditions.have_changed()
    outer.inner.many[0].slope = 1.0
    assert conditions.have_changed()
    outer.inner.many[0].slope, outer.inner.mixed = 0.0, {"low": 0.0}
    assert conditions.have_changed()


def test_what_is_changed_back_is_as_it_was(outer, conditions):
    handle = outer.linear.register_forward_hook(lambda *call: None)
    assert conditions.have_changed()
    handle.remove()
    assert not conditions.have_changed()


def test_a_parameter_whose_hook_is_gone_is_not_named_beside_one_that_has_a_hook(outer, conditions):
    outer.linear.weight.register_hook(lambda grad: None).remove()
    assert not conditions.have_changed()
    outer.linear.bias.register_hook(lambda grad: None)
    assert conditions.changes().startswith("hooks of layer 3.linear.bias changed")


def test_another_hook_in_the_place_of_one_is_a_change(outer):
    outer.linear.register_forward_hook(lambda *call: None)
    reads = AttributeReads()
    reads.of[id(outer.linear)] = {"forward"}
    conditions = ReplayConditions(outer, reads)
    assert not conditions.have_changed()
    (key,) = outer.linear._forward_hooks
    outer.linear._forward_hooks[key] = lambda *call: None
    assert conditions.have_changed()


def test_hooks_of_distributed_data_parallel_come_and_go(outer, conditions):
    def hook(module, args):
        pass

    hook.__module__ = "megatron.core.distributed.distributed_data_parallel"
    handle = outer.linear.register_forward_pre_hook(hook)
    assert not conditions.have_changed()
    outer.linear.register_forward_hook(lambda *call: None)
    handle.remove()
    assert conditions.have_changed()


@pytest.mark.parametrize(
    "change",
    [
        lambda outer: outer.unused.dropout.eval(),
        lambda outer: outer.unused.register_forward_hook(lambda *call: None),
        lambda outer: setattr(outer.inner.config, "unread", 2),
        lambda outer: setattr(outer.inner.flags, "unread", 2),
        lambda outer: outer.inner.results.clear(),
        lambda outer: outer.inner.tables[0].fill_(1.0),
        lambda outer: outer.inner.by_length.update({3: torch.zeros(3)}),
        lambda outer: outer.register_forward_hook(lambda *call: None),
    ],
    ids=[
        *("a module that did not run", "its hook", "an attribute that was not read", "a field that was not read"),
        *("a list that passes append to", "values of a tensor in a list", "more tensors in a dictionary"),
        "a hook that runs around replays",
    ],
)
def test_what_a_replay_does_not_leave_out_is_no_change(outer, conditions, change):
    change(outer)
    assert not conditions.have_changed()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("on_device", lambda inner: setattr(inner, "on_device", inner.on_device.clone())),
        ("bias", lambda inner: setattr(inner, "bias", torch.ones(1))),
        ("limits", lambda inner: inner.limits.update(low=[torch.zeros(1)])),
        ("tables", lambda inner: setattr(inner, "tables", [each.clone() for each in inner.tables])),
    ],
)
def test_another_tensor_of_equal_value_is_a_change(outer, monkeypatch, name, change):
    outer.inner.on_device = torch.zeros(1)
    outer.inner.tables = [torch.zeros(1)]
    conditions = noted(outer)
    compared: list = []
    monkeypatch.setattr(torch.Tensor, "__bool__", compared.append)
    assert not conditions.have_changed()
    change(outer.inner)
    assert conditions.have_changed()
    assert f"{name} of layer 3.inner" in conditions.changes()
    assert compared == []


def test_other_objects_of_equal_value_are_no_change(outer, conditions):
    outer.inner.bias, outer.inner.on_host = float("1"), torch.tensor(1.0)
    outer.inner.limits, outer.inner.options = {"low": [0.0]}, SimpleNamespace(low=0.0)
    outer.inner.tables = list(outer.inner.tables)
    assert not conditions.have_changed()
    outer.inner.bias = 2.0
    assert conditions.have_changed()


def test_an_attribute_that_is_gone_is_a_change(outer, conditions):
    del outer.inner.bias
    assert conditions.have_changed()
    assert "bias of layer 3.inner" in conditions.changes()


@pytest.mark.parametrize("name", ["statistics of FP8", "weights quantized to FP8"])
def test_another_tensor_of_fp8_is_a_change(outer, name):
    tensors = {each: [torch.ones(1)] for each in ("amaxes", "statistics of FP8", "weights quantized to FP8")}
    conditions = ReplayConditions(outer, AttributeReads(), quantized=lambda: list(tensors.values()))
    assert not conditions.have_changed()
    tensors[name] = [torch.ones(1)]
    assert conditions.have_changed()
    assert name in conditions.changes()


class Asking(torch.nn.Module):
    def forward(self, x):
        return x * get_args().scale


def test_flags_that_a_pass_asks_megatron_for_are_compared(monkeypatch):
    args = Namespace(scale=2.0, iteration=1)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    module, reads = Asking(), AttributeReads()
    with reads.noted([module]):
        module(torch.ones(2))
    conditions = ReplayConditions(module, reads)
    args.iteration = 2
    assert not conditions.have_changed()
    args.scale = 3.0
    assert conditions.have_changed()
    assert "scale of Namespace" in conditions.changes()
    args.scale = 2.0
    assert not conditions.have_changed()
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", Namespace(scale=3.0))
    assert conditions.have_changed()
    assert "the parsed flags" in conditions.changes()


def test_autocast_is_compared_with_that_of_the_capture(outer):
    with torch.autocast("cpu", torch.bfloat16):
        conditions = ReplayConditions(outer, AttributeReads())
        assert not conditions.have_changed()
    assert conditions.have_changed()
    assert "autocast" in conditions.changes()


@pytest.mark.parametrize(
    ("kind", "name"), [(Inner, "forward"), (Inner, "amount"), (Base, "amount"), (torch.nn.Linear, "forward")]
)
def test_another_function_in_a_class_is_a_change(outer, conditions, monkeypatch, kind, name):
    monkeypatch.setattr(kind, name, lambda self, *args: None)
    assert conditions.have_changed()
    assert f"{name} of {kind.__name__}" in conditions.changes()
    monkeypatch.undo()
    assert not conditions.have_changed()


@contextmanager
def changed(read, write, value):
    """``write`` takes ``value`` in the context, and afterwards what ``read`` returned."""
    before = read()
    write(value)
    yield
    write(before)


@contextmanager
def setting(owner, name, value):
    """``owner.name`` is ``value`` in the context."""
    with changed(lambda: getattr(owner, name), lambda value: setattr(owner, name, value), value):
        yield


MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn
DETERMINISTIC = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
ORDER = torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order
HALF_SUMS = (
    torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
)
KERNELS = {
    "flash attention of torch": SDPBackend.FLASH_ATTENTION,
    "memory-efficient attention of torch": SDPBackend.EFFICIENT_ATTENTION,
    "attention of torch by matrix products": SDPBackend.MATH,
    "attention of torch by cuDNN": SDPBackend.CUDNN_ATTENTION,
}
LIBRARY = torch.backends.cuda.preferred_blas_library
PRECISION = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
CONTEXTS = [
    ("hooks of saved tensors", lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)),
    ("detection of anomalies", lambda: torch.autograd.detect_anomaly(check_nan=False)),
    ("deterministic algorithms", lambda: changed(*DETERMINISTIC, True)),
    ("TorchDispatchMode", TorchDispatchMode),
    ("TorchFunctionMode", TorchFunctionMode),
    ("default dtype", lambda: changed(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16)),
    ("library of matrix products", lambda: changed(LIBRARY, LIBRARY, "cublaslt")),
    ("TF32 in matrix products", lambda: changed(*PRECISION, "high")),
    ("TF32 in matrix products", lambda: setting(MATMUL, "allow_tf32", True)),
    ("TF32 in matrix products", lambda: setting(MATMUL, "fp32_precision", "tf32")),
    ("TF32 in convolutions", lambda: setting(CUDNN.conv, "fp32_precision", "ieee")),
    ("reduced precision in bf16 products", lambda: setting(MATMUL, "allow_bf16_reduced_precision_reduction", False)),
    ("reduced precision in fp16 products", lambda: setting(MATMUL, "allow_fp16_reduced_precision_reduction", False)),
    ("sums of fp16 products in fp16", lambda: setting(MATMUL, "allow_fp16_accumulation", True)),
    ("deterministic kernels of cuDNN", lambda: setting(CUDNN, "deterministic", True)),
    ("cuDNN", lambda: setting(CUDNN, "enabled", False)),
    ("the order of torch's attentions", lambda: changed(*ORDER, [0, 1, 2, 3, 4])),
    ("sums in half precision in attention of torch", lambda: changed(*HALF_SUMS, True)),
    *(
        (name, partial(torch.nn.attention.sdpa_kernel, [other for other in KERNELS.values() if other != kernel]))
        for name, kernel in KERNELS.items()
    ),
]


@pytest.mark.parametrize(("name", "context"), CONTEXTS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_context_or_setting_that_was_another_at_capture_is_a_change(outer, conditions, name, context):
    with context():
        assert conditions.have_changed()
        assert name in conditions.changes()
    assert not conditions.have_changed()


def test_modules_and_configurations_are_as_before_after_reads_were_noted(outer, conditions):
    for kind in (torch.nn.Module, Config):
        assert "__getattribute__" not in vars(kind)
    assert "__setattr__" not in vars(Config)
    assert torch.nn.Module.__setattr__.__qualname__ == "Module.__setattr__"


def test_what_was_forgotten_has_not_changed(outer, conditions):
    conditions.forget()
    outer.inner.dropout.eval()
    assert not conditions.have_changed()
