"""Test that step plans copy gradients and weights as megatron-core does."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .fsdp_variants import STRATEGIES, Variant, freeze_embedding, small

pytestmark = pytest.mark.sampled

GRAPH_MODE = {"megatron_fsdp_cuda_graph_mode": True}
VARIANTS: dict[str, tuple[str, str, dict]] = {strategy: (strategy, "bf16", {}) for strategy in STRATEGIES}
VARIANTS["fp32"] = ("optim_grads_params", "fp32", {})
VARIANTS["decoupled"] = ("optim_grads_params", "bf16", {"megatron_fsdp_use_decoupled_grad": True})
VARIANTS["bf16 gradients"] = ("optim_grads_params", "bf16", {"megatron_fsdp_main_grads_dtype": torch.bfloat16})


class Launches(TorchDispatchMode):
    """Records the names of all operators except views."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func not in (torch.ops.aten.detach.default,):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def megatron_cores_own(name):
    """Count calls of megatron-core's buffer method ``name`` while in this context."""
    kind = upstream_kind()
    with mock.patch.object(kind, name, autospec=True, side_effect=getattr(kind, name)) as method:
        yield method


@pytest.fixture(params=VARIANTS)
def buffer(ranks, request):
    strategy, dtype, sharding = VARIANTS[request.param]
    variant = Variant(
        small(data_parallel_sharding_strategy=strategy, dtype=dtype),
        sharding=GRAPH_MODE | sharding,
        change=freeze_embedding,
    )
    return variant.build().module.param_and_grad_buffer


def fill(buffer, kind, seed):
    """Fill all buffers of ``kind`` with random values."""
    generator = torch.Generator().manual_seed(seed)
    for group in buffer.parameter_groups:
        data = getattr(getattr(group, kind), "data", None)
        if data is not None:
            data.copy_(torch.randn(data.shape, generator=generator))


def attached(buffer):
    """Return copies of the optimizer's gradients."""
    name = "decoupled_grad" if buffer.use_decoupled_grad else "grad"
    grads = [getattr(param, name, None) for _, param in buffer.optimizer_named_parameters]
    return [None if grad is None else grad._local_tensor.clone() for grad in grads]


def weights(buffer):
    return [
        group.model_weight_buffer.data.clone() for group in buffer.parameter_groups if group.model_weight_buffer
    ] + [param.detach().clone() for param in buffer.params if param.untyped_storage().size()]


def same(these, those):
    return len(these) == len(those) and all(
        this is that or (this.dtype == that.dtype and torch.equal(this, that))
        for this, that in zip(these, those, strict=True)
    )


def upstream_kind():
    from megatron_fsdp_cuda_graphs.overlay import upstream

    return upstream("megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer").ParamAndGradBuffer


def test_gradients_match_megatron_core(buffer):
    fill(buffer, "main_grad_buffer", 1)
    buffer.update_main_grads()
    first = attached(buffer)
    assert any(grad is not None and grad.any() for grad in first)
    fill(buffer, "main_grad_buffer", 2)
    upstream_kind().update_main_grads(buffer)
    expected = attached(buffer)
    assert not same(first, expected)
    buffer.update_main_grads()  # detects that megatron-core has replaced the gradients
    fill(buffer, "main_grad_buffer", 1)
    with megatron_cores_own("update_main_grads") as own:
        buffer.update_main_grads()
        assert same(attached(buffer), first)
        fill(buffer, "main_grad_buffer", 2)
        buffer.update_main_grads()
        assert same(attached(buffer), expected)
    assert not own.called


def test_casts_of_all_gradients_take_one_launch(buffer):
    buffer.update_main_grads()
    main_grads = {group.main_grad_buffer.dtype for group in buffer.parameter_groups if group.main_grad_buffer}
    cast = {grad.dtype for grad in attached(buffer) if grad is not None} != main_grads
    with Launches() as launches:
        buffer.update_main_grads()
    assert launches.names == ["aten._foreach_copy_.default"] * cast


def test_gradients_are_read_from_replaced_memory(buffer):
    buffer.update_main_grads()
    for group in buffer.parameter_groups:
        if group.main_grad_buffer is not None:
            group.main_grad_buffer.data = torch.empty_like(group.main_grad_buffer.data)
    fill(buffer, "main_grad_buffer", 3)
    with megatron_cores_own("update_main_grads") as own:
        buffer.update_main_grads()
    assert own.called
    seen = attached(buffer)
    upstream_kind().update_main_grads(buffer)
    assert same(seen, attached(buffer))


def test_weights_match_megatron_core(buffer):
    in_buffers = all(group.model_weight_buffer for group in buffer.parameter_groups if group.main_weight_buffer)
    for seed in (1, 2):
        fill(buffer, "main_weight_buffer", seed)
        fill(buffer, "model_weight_buffer", 3)
        before = weights(buffer)
        upstream_kind().copy_main_weights_to_model_weights(buffer)
        expected = weights(buffer)
        assert same(before, expected) is not any(group.main_weight_buffer for group in buffer.parameter_groups)
        fill(buffer, "model_weight_buffer", 3)
        with megatron_cores_own("copy_main_weights_to_model_weights") as own:
            buffer.copy_main_weights_to_model_weights()
        assert own.called is not in_buffers
        assert same(weights(buffer), expected)


def test_weights_are_written_to_replaced_memory(buffer):
    buffer.copy_main_weights_to_model_weights()
    for group in buffer.parameter_groups:
        if group.model_weight_buffer is not None:
            group.model_weight_buffer.data = group.model_weight_buffer.data.clone()
    fill(buffer, "model_weight_buffer", 3)
    fill(buffer, "main_weight_buffer", 4)
    buffer.copy_main_weights_to_model_weights()
    seen = weights(buffer)
    upstream_kind().copy_main_weights_to_model_weights(buffer)
    assert same(seen, weights(buffer))
