"""Test that a cast to an FP8 shard computes a transpose only if the shard has one."""

import sys
import types
from typing import Any

import pytest

from megatron.core.distributed.fsdp.src.megatron_fsdp import mixed_precision

MODULE = "transformer_engine.pytorch.tensor.float8_tensor"


class Float8Quantizer:
    """A stand-in for TransformerEngine's quantizer that records the row-wise and column-wise usage of each cast."""

    def __init__(self, *, rowwise=True, columnwise=True, fails=False):
        self.rowwise_usage, self.columnwise_usage, self.fails = rowwise, columnwise, fails
        self.written = []

    def set_usage(self, *, rowwise=None, columnwise=None):
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def update_quantized(self, src, dst, *, noop_flag=None):
        self.written.append((self.rowwise_usage, self.columnwise_usage, noop_flag))
        if self.fails:
            raise RuntimeError("out of memory")
        return dst


def shard(transpose=None):
    return types.SimpleNamespace(_transpose=transpose)


@pytest.fixture(autouse=True)
def transformer_engine(monkeypatch):
    module: Any = types.ModuleType(MODULE)
    module.Float8Quantizer = Float8Quantizer
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.tensor"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)


@pytest.mark.parametrize(
    ("usage", "transpose", "written"),
    [
        ({}, None, (True, False)),
        ({}, "a transpose", (True, True)),
        ({"rowwise": False}, None, (False, True)),
        ({"columnwise": False}, None, (True, False)),
    ],
)
def test_tensors_without_a_transpose_get_rows_only(usage, transpose, written):
    quantizer = Float8Quantizer(**usage)
    to = shard(transpose)
    with mixed_precision.without_transposes():
        assert quantizer.update_quantized("weights", to, noop_flag="flag") is to
    assert quantizer.written == [(*written, "flag")]
    quantizer.update_quantized("weights", to)
    before = (usage.get("rowwise", True), usage.get("columnwise", True))
    assert quantizer.written[1] == (*before, None)


def test_failed_cast_restores_the_quantizer():
    quantizer = Float8Quantizer(fails=True)
    with pytest.raises(RuntimeError, match="out of memory"), mixed_precision.without_transposes():
        quantizer.update_quantized("weights", shard())
    assert quantizer.columnwise_usage
    with pytest.raises(RuntimeError, match="out of memory"):
        quantizer.update_quantized("weights", shard())
    assert [columnwise for _, columnwise, _ in quantizer.written] == [False, True]


def test_optimizer_casts_skip_transposes(monkeypatch):
    quantizer = Float8Quantizer()

    def cast(params, main, *others):
        assert others == ([0], "group", ["shard"])
        quantizer.update_quantized(main[0], shard())

    monkeypatch.setattr(mixed_precision._upstream, "fp8_quantize", cast)
    mixed_precision.fp8_quantize(["weights"], ["main weights"], [0], "group", ["shard"])
    assert quantizer.written == [(True, False, None)]
