"""Test that router statistics are reset after each step, and shared embedding gradients are reduced."""

import gc
import importlib
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

CONFIG = SimpleNamespace(moe_router_enable_expert_bias=True, moe_router_load_balancing_type="global_aux_loss")


class Router(torch.nn.Module):
    """A router with statistics to reset after each step."""

    def __init__(self):
        super().__init__()
        self.expert_bias = torch.zeros(2)
        self.local_tokens_per_expert = torch.ones(2)
        self.qb_beta_accum, self.qb_beta_count = torch.ones(2), torch.ones(1)
        self.reset_global_aux_loss_tracker = mock.Mock()


@pytest.fixture
def reset():
    from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors

    return reset_model_temporary_tensors


def test_every_router_is_reset_in_every_step(reset):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Router(), torch.nn.Sequential(Router()))
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for step in range(1, 3):
        for router in routers:
            router.local_tokens_per_expert.fill_(1)
        reset(CONFIG, [model, torch.nn.Linear(2, 2)])
        assert [router.local_tokens_per_expert.tolist() for router in routers] == [[0, 0]] * 2
        assert [router.reset_global_aux_loss_tracker.call_count for router in routers] == [step] * 2


def test_each_model_is_searched_for_routers_once(reset):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with mock.patch.object(torch.nn.Sequential, "modules", autospec=True, side_effect=torch.nn.Module.modules) as walk:
        for _ in range(3):
            reset(CONFIG, [model])
    assert walk.call_count == 1


def test_models_are_freed_after_a_reset(reset):
    model = torch.nn.Sequential(Router())
    model[0].expert_bias.of_model = model  # parameters also reference their MegatronFSDP
    reset(CONFIG, [model])
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


class Chunk(torch.nn.Module):
    """The first chunk of a pipeline, which shares its embedding with the last chunk."""

    pre_process, ddp_config = True, SimpleNamespace(use_megatron_fsdp=True)

    def __init__(self, weight):
        super().__init__()
        self.weight = weight


def sharded(values, mesh):
    return DTensor.from_local(torch.tensor(values), mesh, [Replicate()])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("attribute", ["grad", "decoupled_grad"])
def test_shared_embedding_gradients_are_reduced_in_place(monkeypatch, attribute):
    one_rank_mesh = init_device_mesh("cpu", (1,))
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    weight = torch.nn.Parameter(sharded([1.0, 2.0], one_rank_mesh))
    gradient = sharded([3.0, 4.0], one_rank_mesh)
    setattr(weight, attribute, gradient)
    group = mock.Mock(size=lambda: 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(2))
    monkeypatch.setattr(module, "is_pp_first_stage", lambda _: True)
    module._allreduce_embedding_grad([Chunk(weight)], group, group, lambda chunk: chunk.weight)
    assert getattr(weight, attribute) is gradient
    assert gradient.to_local().tolist() == [6, 8]


@pytest.mark.parametrize(("sizes", "calls"), [((None, None), 0), ((1, None), 0), ((2, None), 1), ((1, 2), 1)])
def test_gradients_are_reduced_over_ranks_sharing_weights(monkeypatch, sizes, calls):
    from megatron.core import parallel_state

    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")  # shadowed by a function
    groups = [None if size is None else SimpleNamespace(size=lambda size=size: size) for size in sizes]
    for name, group in zip(("gtp", "expert_gtp"), groups, strict=True):
        monkeypatch.setattr(parallel_state, f"get_{name}_weight_remat_group", lambda group=group, **kwargs: group)
    reduce = mock.Mock()
    monkeypatch.setattr(module._upstream, "_allreduce_replicated_grads_over_gtp_remat_group", reduce)
    module._allreduce_replicated_grads_over_gtp_remat_group(["model"], True)
    assert reduce.mock_calls == [mock.call(["model"], True)] * calls
