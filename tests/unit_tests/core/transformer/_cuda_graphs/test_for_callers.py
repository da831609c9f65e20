"""for_callers: functions of megatron-core's module that others call."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron.core.transformer._cuda_graphs import for_callers
from megatron.core.transformer.cuda_graphs import (
    ArgMetadata,
    CudagraphBufferMetadata,
    _backup_grads_before_capture,
    _restore_grads_after_capture,
    _set_skip_fp8_weight_update_tensor,
    alloc_tensor_from_graph_mempool,
    create_strong_ref,
    make_weakref,
)

FACE = "megatron.core.transformer.cuda_graphs"


# ---------------------------------------------------------------------------------------------------- quantization


@pytest.fixture
def with_manager(monkeypatch):
    """TransformerEngine with this class in the place of ``FP8GlobalStateManager``."""

    def install(manager):
        monkeypatch.setattr(f"{FACE}.HAVE_TE_GRAPHS", True)
        monkeypatch.setattr(for_callers, "FP8GlobalStateManager", manager, raising=False)

    return install


def test_a_setter_of_transformer_engine_is_called(with_manager):
    manager = SimpleNamespace(set_skip_fp8_weight_update_tensor=mock.Mock())
    with_manager(manager)
    _set_skip_fp8_weight_update_tensor(True)
    manager.set_skip_fp8_weight_update_tensor.assert_called_once_with(True)


def test_without_a_setter_the_flag_is_written_at_one_address(with_manager, cpu_backend):
    state = SimpleNamespace(skip_fp8_weight_update_tensor=None)
    with_manager(SimpleNamespace(quantization_state=state))
    _set_skip_fp8_weight_update_tensor(True)
    flag = state.skip_fp8_weight_update_tensor
    address = flag.data_ptr()
    assert (flag.shape, flag.dtype, flag.is_cuda, flag.item()) == ((1,), torch.float32, True, 1.0)
    _set_skip_fp8_weight_update_tensor(False)
    assert (state.skip_fp8_weight_update_tensor.data_ptr(), flag.item()) == (address, 0.0)


def test_without_transformer_engine_nothing_is_done(monkeypatch):
    monkeypatch.setattr(f"{FACE}.HAVE_TE_GRAPHS", False)
    _set_skip_fp8_weight_update_tensor(True)


# ------------------------------------------------------------------------------------------------------ references


def of_the_pool():
    return alloc_tensor_from_graph_mempool(ArgMetadata(torch.zeros(4, device="cuda", requires_grad=True)))


@pytest.mark.parametrize("value", [3, None, torch.ones(2)], ids=["int", "None", "tensor of no pool"])
def test_what_is_of_no_graph_pool_is_returned_as_it_is(value):
    assert make_weakref(value) is value
    assert make_weakref(value, inplace=False) is value


@pytest.mark.usefixtures("no_graphs")
class TestReferences:
    def test_a_tensor_gives_up_its_memory_in_place(self):
        tensor = of_the_pool()
        address, storage = tensor.data_ptr(), tensor.untyped_storage()
        assert make_weakref(tensor) is tensor
        assert tensor.data_ptr() == address
        assert tensor.untyped_storage()._cdata != storage._cdata

    def test_a_weak_copy_leaves_the_tensor_its_memory(self):
        tensor = of_the_pool()
        storage = tensor.untyped_storage()._cdata
        weak = make_weakref(tensor, inplace=False)
        assert weak is not tensor
        assert weak.data_ptr() == tensor.data_ptr()
        assert tensor.untyped_storage()._cdata == storage

    def test_a_strong_reference_shares_memory_and_what_is_noted(self):
        tensor = of_the_pool()
        tensor.cg_buffer_metadata = CudagraphBufferMetadata(input_use_count=2)
        tensor.can_skip_replay_copy = True
        strong = create_strong_ref(tensor)
        assert strong.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        assert strong.is_leaf
        assert (strong.requires_grad, strong.is_from_global_mempool, strong.can_skip_replay_copy) == (True, True, True)
        assert strong.cg_buffer_metadata == tensor.cg_buffer_metadata
        assert strong.cg_buffer_metadata is not tensor.cg_buffer_metadata

    def test_a_strong_reference_has_no_notes_that_the_tensor_lacks(self):
        assert vars(create_strong_ref(torch.ones(2))) == {}


# ------------------------------------------------------------------------------------------------------ main grads


def runner_of(module, gtp_remat=False):
    return SimpleNamespace(base_module=module, gtp_remat=gtp_remat)


def with_main_grad(value):
    param = torch.nn.Parameter(torch.zeros(2))
    param.main_grad = torch.full((2,), float(value))
    return param


def test_main_gradients_are_restored_in_place():
    module = torch.nn.Linear(2, 2)
    module.weight.main_grad = torch.full((2, 2), 3.0)
    address = module.weight.main_grad.data_ptr()
    backup = _backup_grads_before_capture(runner_of(module))
    module.weight.main_grad.add_(1)
    _restore_grads_after_capture(backup)
    assert module.weight.main_grad.eq(3).all()
    assert module.weight.main_grad.data_ptr() == address


def test_a_backup_names_parameters_by_their_id():
    module = torch.nn.Linear(2, 2)
    module.weight.main_grad = torch.full((2, 2), 3.0)
    backup = _backup_grads_before_capture(runner_of(module))
    assert list(backup) == [id(module.weight)]
    param, copied = backup[id(module.weight)]
    assert param is module.weight
    assert copied is not module.weight.main_grad


@pytest.mark.parametrize("gtp_remat", [False, True])
def test_the_next_sharded_weights_belong_to_a_backup_under_gtp(gtp_remat):
    module = torch.nn.ParameterList([with_main_grad(1), with_main_grad(2)])
    following, expert = with_main_grad(3), with_main_grad(4)
    for param, after in zip(
        module, (following, SimpleNamespace(is_routed_expert=True, weight_list=[expert])), strict=True
    ):
        param.is_gtp_weight_remat, param.next_w = True, after
    backup = _backup_grads_before_capture(runner_of(module, gtp_remat))
    assert {id(following), id(expert)} <= set(backup) if gtp_remat else len(backup) == 2
