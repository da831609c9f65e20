"""Test that snapshots detect and name changes since capture."""

from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer._cuda_graphs.errors import ChangedSinceCaptureError, UnsupportedError
from megatron.core.transformer._cuda_graphs.snapshot import (
    Snapshot,
    addresses,
    is_third_party,
    memory_aspects,
    module_aspects,
    named,
    quantized_aspect,
    refuse_changed_attributes,
    replays,
)


def of_core(kind):
    """Make ``kind`` look like a class of megatron-core."""
    kind.__module__ = "megatron.core.transformer"
    return kind


@dataclass
class Config:
    scale: float = 2.0
    cuda_graph_impl: str = "transformer_engine"
    timers: object = None


@dataclass
class Provider(ModelParallelConfig):
    """A third-party configuration whose name does not end with "Config"."""

    scale: float = 2.0


@of_core
class Core(torch.nn.Module):
    """Stand-in for a module of megatron-core."""

    def __init__(self, config):
        super().__init__()
        self.config, self.hidden_dropout, self.softmax_scale, self.act = config, 0, None, torch.tanh
        self.linear, self.dropout = torch.nn.Linear(2, 2), torch.nn.Dropout(0.0)
        self.calls, self.is_moe = 0, False

    def forward(self, x):
        return x


class Own(torch.nn.Module):
    """A third-party module."""

    def __init__(self):
        super().__init__()
        self.limits, self.by_length = {"low": [0.0]}, {2: torch.zeros(2)}
        self.on_host, self.on_device, self._offset = torch.tensor(1.0), torch.zeros(2), 0
        self.recent, self.name, self.group, self.mask = deque([0.0]), "own", object(), None
        self.counts: Counter[str] = Counter()
        self.pair, self.parts = ([0], torch.tensor(1.0)), [torch.zeros(1)]
        self.array, self.step, self.span = np.zeros(2), np.int64(1), range(2)
        self.cycle: list = [1]
        self.cycle += [self.cycle, self.cycle]
        self.register_buffer("shift", torch.zeros(2))
        self.register_buffer("cache", None)

    def forward(self, x):
        return x


@pytest.fixture
def root():
    root = torch.nn.Module()
    root.core, root.own = Core(Config()), Own()
    return root


def snapshot_of(root, **options):
    return Snapshot("change it back", *module_aspects(named(root, "layer 3"), around=root, **options))


@pytest.fixture
def snapshot(root):
    snapshot = snapshot_of(root)
    assert not snapshot.changed()
    return snapshot


CHANGES = {
    "training of layer 3.core.dropout (True at capture, False now)": lambda root: root.core.dropout.eval(),
    "p of layer 3.core.dropout (0.0 at capture, 0.5 now)": lambda root: setattr(root.core.dropout, "p", 0.5),
    "hidden_dropout of layer 3.core": lambda root: setattr(root.core, "hidden_dropout", 0.5),
    "softmax_scale of layer 3.core": lambda root: setattr(root.core, "softmax_scale", 0.5),
    "act of layer 3.core": lambda root: setattr(root.core, "act", torch.relu),
    "config of layer 3.core": lambda root: setattr(root.core, "config", Config(scale=3.0)),
    "scale of Config (2.0 at capture, 3.0 now)": lambda root: setattr(root.core.config, "scale", 3.0),
    "forward of layer 3.core": lambda root: setattr(root.core, "forward", abs),
    "linear of layer 3.core": lambda root: setattr(root.core, "linear", torch.nn.Linear(2, 2)),
    "hooks of layer 3.core.linear": lambda root: root.core.linear.register_forward_hook(lambda *call: None),
    "hooks of bias of layer 3.core.linear": lambda root: root.core.linear.bias.register_hook(lambda grad: None),
    "weight of layer 3.core.linear": lambda root: setattr(
        root.core.linear, "weight", torch.nn.Parameter(root.core.linear.weight.detach())
    ),
    "requires_grad of bias of layer 3.core.linear": lambda root: root.core.linear.bias.requires_grad_(False),
    "the address of shift of layer 3.own (0x": lambda root: setattr(root.own, "shift", torch.zeros(2)),
    "on_device of layer 3.own": lambda root: setattr(root.own, "on_device", torch.zeros(2)),
    "on_host of layer 3.own": lambda root: root.own.on_host.fill_(2.0),
    "limits of layer 3.own": lambda root: root.own.limits["low"].append(1.0),
    "_offset of layer 3.own (0 at capture, 1 now)": lambda root: setattr(root.own, "_offset", 1),
    "name of layer 3.own ('own' at capture": lambda root: setattr(root.own, "name", "other"),
    "mask of layer 3.own": lambda root: setattr(root.own, "mask", torch.zeros(2)),
    "recent of layer 3.own": lambda root: root.own.recent.append(1.0),
    "counts of layer 3.own": lambda root: root.own.counts.update("a"),
    "pair of layer 3.own": lambda root: root.own.pair[0].append(1),
    "parts of layer 3.own": lambda root: setattr(root.own, "parts", [torch.zeros(1)]),
    "array of layer 3.own": lambda root: setattr(root.own, "array", np.ones(2)),
    "step of layer 3.own": lambda root: setattr(root.own, "step", np.int64(2)),
    "span of layer 3.own": lambda root: setattr(root.own, "span", range(3)),
    "cycle of layer 3.own": lambda root: setattr(root.own, "cycle", [1]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_noticed_and_named(root, snapshot, name):
    CHANGES[name](root)
    assert snapshot.changed()
    assert snapshot.reason().startswith(f"changed since capture: {name}")
    assert snapshot.reason().endswith("; change it back")
    with pytest.raises(ChangedSinceCaptureError, match="changed since capture"):
        snapshot.check()


@pytest.mark.parametrize(
    "change",
    [
        lambda root: root.register_forward_hook(lambda *call: None),
        lambda root: setattr(root.core, "calls", 7),
        lambda root: setattr(root.core, "current_microbatch", 7),
        lambda root: setattr(root.core.config, "cuda_graph_impl", "none"),
        lambda root: setattr(root.core.config, "timers", object()),
        lambda root: root.core.linear.weight.data.fill_(1.0),
        lambda root: root.own.on_device.fill_(1.0),
        lambda root: root.own.by_length.update({3: torch.zeros(3)}),
        lambda root: setattr(root.own, "cache", torch.zeros(3)),
        lambda root: setattr(root.own, "limits", {"low": [0.0]}),
        lambda root: setattr(root.own, "group", object()),
        lambda root: setattr(root.own, "input_tensor", torch.zeros(2)),
    ],
    ids=[
        *("hook around replays", "core counter", "microbatch", "graph option", "timers"),
        *("parameter in place", "tensor in place", "growing cache", "late buffer", "equal dictionary", "other object"),
        "stage input",
    ],
)
def test_irrelevant_change_is_ignored(root, snapshot, change):
    change(root)
    assert not snapshot.changed()
    root.core.dropout.eval()
    assert snapshot.changed()


def test_configuration_of_another_package_is_compared(root):
    root.core.config = Provider()
    snapshot = snapshot_of(root)
    root.core.config.timers = object()
    assert not snapshot.changed()
    root.core.config.scale = 3.0
    assert "scale of Provider (2.0 at capture, 3.0 now)" in snapshot.reason()


def test_removed_hook_is_a_change(root):
    handle = root.core.linear.register_forward_hook(lambda *call: None)
    snapshot = snapshot_of(root)
    assert not snapshot.changed()
    handle.remove()
    assert snapshot.changed()


def test_hooks_of_distributed_data_parallel_are_ignored(root, snapshot):
    def hook(module, args):
        pass

    hook.__module__ = "megatron.core.distributed.distributed_data_parallel"
    handle = root.core.linear.register_forward_pre_hook(hook)
    assert not snapshot.changed()
    root.core.linear.register_forward_hook(lambda *call: None)
    handle.remove()
    assert snapshot.changed()


def test_hooks_of_all_modules_are_compared(snapshot):
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *call: None)
    assert "hooks of all modules" in snapshot.reason()
    handle.remove()
    assert not snapshot.changed()


def test_requires_grad_is_compared_in_grad_mode(root, snapshot):
    root.core.linear.bias.requires_grad_(False)
    with torch.no_grad():
        assert not snapshot.changed()
    assert snapshot.changed()


def test_device_tensors_are_not_compared_by_value(root, monkeypatch):
    root.own.on_host = None
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: pytest.fail("waited for the device"))
    root.own.pair, zero = None, torch.zeros(1)
    snapshot = snapshot_of(root)
    for name, changed in (("on_device", zero), ("parts", [zero]), ("_offset", zero)):
        value = getattr(root.own, name)
        setattr(root.own, name, changed)
        assert snapshot.changed()
        setattr(root.own, name, value)
        assert not snapshot.changed()


def test_only_captured_parts_are_compared(root):
    modules = named(root, "layer 3", [root.core.linear])
    assert list(modules.values()) == ["layer 3", "layer 3.core.linear"]
    snapshot = Snapshot("", *module_aspects(modules))
    root.core.dropout.eval()
    assert not snapshot.changed()
    root.eval()
    assert "training of layer 3 " in snapshot.reason()


def test_replaced_forward_is_left_out(root):
    snapshot = snapshot_of(root, replaced=root)
    root.forward = abs
    assert not snapshot.changed()


@pytest.mark.parametrize("moved", ["weight", "main_grad", "removed"])
def test_parameter_addresses_are_compared(root, moved):
    linear = root.core.linear
    linear.weight.main_grad = torch.zeros(2, 2)
    snapshot = Snapshot("", *memory_aspects(named(root), main_grads=True))
    assert not snapshot.changed()
    if moved == "weight":
        linear.weight.data = torch.zeros(2, 2)
    elif moved == "main_grad":
        linear.weight.main_grad = torch.zeros(2, 2)
    else:
        del linear.weight.main_grad
    named_so = "the address of weight of" if moved == "weight" else "the address of the main gradient of weight of"
    with pytest.raises(ChangedSinceCaptureError, match=f"{named_so} Module.core.linear|{named_so} core.linear"):
        snapshot.check()


def test_suspended_replays_count_as_changed(snapshot):
    with replays.suspended("the step runs again"):
        assert snapshot.changed()
        assert snapshot.reason() == "the step runs again"
    assert not snapshot.changed()


def test_forgotten_snapshot_never_changes(root, snapshot):
    snapshot.forget()
    root.core.dropout.eval()
    assert not snapshot.changed()


def test_addresses_are_compared():
    fixed, current = torch.zeros(2), [torch.zeros(2), None]
    snapshot = Snapshot("do not", addresses(["first"], [fixed]), addresses(["second", "third"], lambda: current))
    snapshot.check()
    before, fixed.data = fixed.data, torch.zeros(3)
    with pytest.raises(ChangedSinceCaptureError, match=r"first \(0x\w+ at capture, 0x\w+ now\); do not"):
        snapshot.check()
    fixed.data, current[1] = before, torch.zeros(2)
    with pytest.raises(ChangedSinceCaptureError, match=r"third \(0x0 at capture"):
        snapshot.check()
    second, current[:] = current[0], [None, None]
    with pytest.raises(ChangedSinceCaptureError, match=r"second \(0x\w+ at capture, 0x0 now\); do not"):
        snapshot.check()
    current[:] = [second]
    with pytest.raises(ChangedSinceCaptureError, match=r"number of values \(first: second"):
        snapshot.check()


@pytest.mark.parametrize("name", ["FP8 statistics", "weights quantized to FP8"])
def test_other_fp8_tensor_is_a_change(name):
    tensors = {each: [torch.ones(1)] for each in ("amaxes", "FP8 statistics", "weights quantized to FP8")}
    snapshot = Snapshot("", quantized_aspect(lambda: list(tensors.values())))
    assert not snapshot.changed()
    tensors[name] = [torch.ones(1)]
    assert name in snapshot.reason()


@contextmanager
def changed(read, write, value):
    """Set a setting, accessed by the functions ``read`` and ``write``, to ``value`` while in this context."""
    before = read()
    write(value)
    yield
    write(before)


@contextmanager
def setting(owner, name, value):
    """Set ``owner.name`` to ``value`` while in this context."""
    with changed(lambda: getattr(owner, name), lambda value: setattr(owner, name, value), value):
        yield


MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn
DETERMINISTIC = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
KERNELS = {
    "flash attention": SDPBackend.FLASH_ATTENTION,
    "memory-efficient attention": SDPBackend.EFFICIENT_ATTENTION,
    "math attention": SDPBackend.MATH,
    "cuDNN attention": SDPBackend.CUDNN_ATTENTION,
}
LIBRARY = torch.backends.cuda.preferred_blas_library
PRECISION = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
CONTEXTS = [
    ("autocast", lambda: torch.autocast("cpu", torch.bfloat16)),
    ("saved tensor hooks", lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)),
    ("anomaly detection", lambda: torch.autograd.detect_anomaly(check_nan=False)),
    ("deterministic algorithms", lambda: changed(*DETERMINISTIC, True)),
    ("TorchDispatchMode", TorchDispatchMode),
    ("TorchFunctionMode", TorchFunctionMode),
    ("default dtype", lambda: changed(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16)),
    ("BLAS library", lambda: changed(LIBRARY, LIBRARY, "cublaslt")),
    ("TF32 matrix products", lambda: changed(*PRECISION, "high")),
    ("TF32 matrix products", lambda: setting(MATMUL, "allow_tf32", True)),
    ("TF32 convolutions", lambda: setting(CUDNN.conv, "fp32_precision", "ieee")),
    ("reduced-precision fp16 reductions", lambda: setting(MATMUL, "allow_fp16_reduced_precision_reduction", False)),
    ("fp16 accumulation", lambda: setting(MATMUL, "allow_fp16_accumulation", True)),
    ("deterministic cuDNN kernels", lambda: setting(CUDNN, "deterministic", True)),
    *(
        (name, partial(torch.nn.attention.sdpa_kernel, [other for other in KERNELS.values() if other != kernel]))
        for name, kernel in KERNELS.items()
    ),
]


@pytest.mark.parametrize(("name", "context"), CONTEXTS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_changed_context_or_setting_is_a_change(snapshot, name, context):
    with context():
        assert snapshot.changed()
        assert name in snapshot.reason()
    assert not snapshot.changed()


def count(own):
    own._offset += 1


def list_call(own):
    own.recent.append(1.0)


def count_in_dictionary(own):
    own.limits["low"][0] += 1


def average(own):
    own.on_host.mul_(0.9)


def count_names(own):
    own.counts["a"] += 1


def count_in_tuple(own):
    own.pair[0][0] += 1
    own.pair[1].add_(1.0)


def replace_buffer(own):
    own.shift = own.shift * 0.9


STATES = {
    "_offset": count,
    "recent": list_call,
    "limits": count_in_dictionary,
    "on_host": average,
    "counts": count_names,
    "pair": count_in_tuple,
    "shift": replace_buffer,
}


@pytest.mark.parametrize("name", STATES)
def test_attribute_changed_by_passes_is_refused_and_restored(root, name):
    own = root.own
    held = own.limits, own.recent, own.shift, own.counts, own.pair[0], own.on_host
    refused = pytest.raises(UnsupportedError, match=f"each forward pass changes {name} of Own")
    with refused, refuse_changed_attributes([root]):
        STATES[name](own)
    assert (own._offset, own.limits, own.recent, own.on_host.item()) == (0, {"low": [0.0]}, deque([0.0]), 1.0)
    assert (own.counts, own.pair) == (Counter(), ([0], torch.tensor(1.0)))
    assert all(map(is_, (own.limits, own.recent, own.shift, own.counts, own.pair[0], own.on_host), held))


def test_attributes_are_restored_after_an_exception(root):
    def interrupted():
        count(root.own)
        raise KeyError

    with pytest.raises(KeyError), refuse_changed_attributes([root]):
        interrupted()
    assert root.own._offset == 0


def test_in_place_changes_and_first_setup_are_allowed(root):
    own = root.own
    with refuse_changed_attributes([root]):
        own.shift.add_(1.0)
        own.by_length[3] = torch.zeros(3)
        own.group, own.mask = object(), torch.ones(1)
        root.core.calls += 1
    assert own.mask is not None


@pytest.mark.parametrize(
    ("module", "third_party"),
    [
        ("megatron.bridge.peft.lora", True),
        ("megatron.core.transformer.mlp", False),
        ("transformer_engine.pytorch.module.linear", False),
    ],
)
def test_third_party_modules_are_recognized_by_bases(module, third_party):
    kind = type("Kind", (torch.nn.Module,), {"__module__": module})
    assert is_third_party(kind) == third_party
    derived = type("Derived", (kind,), {"__module__": "someone.elses"})
    assert is_third_party(derived) == (not module.startswith("transformer_engine"))
