"""Test the distributed optimizer under Megatron-FSDP: gradients, graphs of clipping, and checkpoints."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.optimizer import optimizer as core_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


@pytest.fixture
def optimizer():
    """Return a factory of optimizers whose parameters have the given gradients."""

    def make(grads, name="grad", fsdp=True):
        made = DistributedOptimizer.__new__(DistributedOptimizer)
        params = [SimpleNamespace(**{name: grad}) for grad in grads]
        made.ddp_config = SimpleNamespace(use_megatron_fsdp=fsdp)
        # Megatron-FSDP reads the first option; the second is False with FP8 recipes.
        made.config = SimpleNamespace(
            use_precision_aware_optimizer=name == "decoupled_grad", use_precision_aware_optimizer_no_fp8_or_ds_fp8=False
        )
        made.is_stub_optimizer = False
        made.optimizer = SimpleNamespace(param_groups=[{"params": params[:1]}, {"params": params[1:]}])
        return made

    return make


def sharded(tensor):
    return SimpleNamespace(_local_tensor=tensor)


@pytest.mark.parametrize("name", ["grad", "decoupled_grad"])
def test_unscaling_divides_the_shards_of_this_rank(optimizer, name):
    shards = [torch.ones(2), torch.ones(3)]
    made = optimizer([sharded(shards[0]), None, sharded(shards[1])], name)
    assert [id(grad) for grad in made._collect_main_grad_data_for_unscaling()] == [id(shard) for shard in shards]


@pytest.mark.parametrize("fsdp", [True, False])
def test_megatron_fsdp_steps_on_local_shards(optimizer, monkeypatch, mesh, fsdp):
    made = optimizer([None], fsdp=fsdp)
    param = torch.nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Shard(0)]))
    made.optimizer = torch.optim.Adam([param])
    made.model_chunks = []
    param.grad = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
    made.optimizer.step()  # creates the states
    upstream = next(kind for kind in type(made).__mro__[1:] if "step_with_ready_grads" in vars(kind))
    seen: list[bool] = []

    def step(self):
        seen.extend(isinstance(each, DTensor) for group in self.optimizer.param_groups for each in group["params"])
        self.optimizer.step()

    monkeypatch.setattr(upstream, "step_with_ready_grads", step)
    made.step_with_ready_grads()
    assert seen == [not fsdp]
    assert made.optimizer.param_groups[0]["params"] == [param]
    assert made.optimizer.state[param]["step"].item() == 2


@pytest.mark.parametrize(
    ("impl", "states", "fsdp", "releases"),
    [
        ("transformer_engine", {}, False, 1),
        ("none", {}, False, 0),
        ("transformer_engine", {1: {}}, False, 0),
        ("transformer_engine", {}, True, 0),
    ],
)
def test_first_states_do_not_use_cached_memory(optimizer, monkeypatch, impl, states, fsdp, releases):
    made = optimizer([None], fsdp=fsdp)
    made.optimizer.state, made.model_chunks = states, [SimpleNamespace(config=SimpleNamespace(cuda_graph_impl=impl))]
    upstream = next(kind for kind in type(made).__mro__[1:] if "step_with_ready_grads" in vars(kind))
    empty_cache = mock.Mock()
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(type(made), "_on_local_shards", lambda self: nullcontext())
    monkeypatch.setattr(upstream, "step_with_ready_grads", lambda self: empty_cache.call_count == releases)
    assert made.step_with_ready_grads()
    assert empty_cache.call_count == releases


@pytest.fixture
def clipping(optimizer, monkeypatch, mesh):
    """Return a function that builds an optimizer and a stub of its graphs with the ``keys`` of ``RepeatedWork.run``."""
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", len)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def make():
        grads = [DTensor.from_local(torch.ones(3), mesh, [Shard(0)]) for _ in range(2)]
        for grad in grads:
            grad.stays = True
        made = optimizer([grads[0], None, grads[1]])
        upstream = next(kind for kind in type(made).__mro__[1:] if "clip_grad_norm" in vars(kind))
        monkeypatch.setattr(upstream, "clip_grad_norm", lambda self, clip_grad: ("norm", clip_grad))
        passes = SimpleNamespace(repeated={}, keys=[])

        def run(self, key, work):
            passes.keys.append(key)
            return work()

        monkeypatch.setattr("megatron.core.optimizer.repeated_work.RepeatedWork.run", run)
        made.model_chunks = [SimpleNamespace(module=SimpleNamespace(graphs=SimpleNamespace(whole_passes=passes)))]
        return made, passes

    return make


def test_clipping_runs_as_repeated_work(clipping):
    made, passes = clipping()
    first, *_ = made.get_parameters()
    assert [made.clip_grad_norm(bound) for bound in (1.0, 1.0, 2.0)] == [("norm", 1.0), ("norm", 1.0), ("norm", 2.0)]
    first.grad._local_tensor = torch.ones(3)
    made.clip_grad_norm(1.0)
    same, again, other_bound, other_memory = passes.keys
    assert same == again
    assert other_bound != same != other_memory
    assert list(passes.repeated) == [made]


# Each change prevents the capture of clipping.
CHANGES = {
    "no FSDP": lambda made, patch: setattr(made.ddp_config, "use_megatron_fsdp", False),
    "no graphs": lambda made, patch: setattr(made.model_chunks[0].module.graphs, "whole_passes", None),
    "several chunks": lambda made, patch: made.model_chunks.extend(made.model_chunks),
    "no parameters": lambda made, patch: setattr(made, "is_stub_optimizer", True),
    "another capture": lambda made, patch: patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True),
    "a norm on the host": lambda made, patch: patch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", None),
    "gradients that do not stay": lambda made, patch: setattr(made.get_parameters()[0].grad, "stays", False),
    "norms of groups": lambda made, patch: setattr(
        made.get_parameters()[1], core_optimizer.GRAD_NORM_GROUP_ATTR, core_optimizer.MTP_GRAD_NORM_GROUP
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_uncapturable_clipping_runs_as_in_megatron_core(clipping, monkeypatch, change):
    made, passes = clipping()
    CHANGES[change](made, monkeypatch)
    assert made.clip_grad_norm(1.0) == ("norm", 1.0)
    assert passes.keys == []


class CountsInGroups(torch.optim.AdamW):
    """Counts steps in the parameter groups, as TransformerEngine's Adam does."""

    def step(self):
        self.param_groups[0]["step"] = self.param_groups[0].get("step", 0) + 1
        super().step()


@pytest.mark.parametrize("kind", [torch.optim.Adam, CountsInGroups])
def test_states_to_load_into_do_not_affect_training(optimizer, mesh, kind):
    def train(loads):
        made, param = optimizer([]), torch.nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Shard(0)]))
        made.optimizer, made.grad_scaler, made.param_to_name = kind([param], weight_decay=0.5), None, {param: "weight"}
        for _ in range(2):
            if loads:
                assert len(made.sharded_param_state_fsdp_dtensor(is_loading=True)["state"]["weight"]) == 3
            param.grad = torch.full_like(param, 0.25)
            made.optimizer.step()
        group = made.optimizer.param_groups[0]
        tensors = [getattr(each, "_local_tensor", each) for each in (param, *made.optimizer.state[param].values())]
        return [tensor.tolist() for tensor in tensors], [group.get(name) for name in ("step", "weight_decay")]

    assert train(loads=True) == train(loads=False)


def test_reloading_model_parameters_is_a_no_op(optimizer):
    made = optimizer([None])
    made.param_groups = made.optimizer.param_groups
    made.reload_model_params({"model": {}})  # must not raise


def test_optimizer_on_the_host_reloads_parameters(optimizer, monkeypatch):
    for module in (distrib_optimizer, distrib_optimizer._upstream):
        monkeypatch.setattr(module, "HybridDeviceOptimizer", mock.Mock)
    made = optimizer([None])
    made.optimizer = mock.Mock()
    made._copy_model_params_to_main_params()
    made.optimizer.update_fp32_param_by_new_param.assert_called_once_with()


def test_loss_scale_of_1_is_read_without_a_sync(optimizer):
    made = optimizer([None])
    made.grad_scaler, made._scale_one = None, torch.ones(1)
    with mock.patch.object(torch.Tensor, "item", side_effect=AssertionError("synchronizes")):
        assert [made.get_loss_scale().item() for _ in range(2)] == [1.0, 1.0]
    assert torch.equal(made.scale_loss(torch.tensor(3.0)), torch.tensor([3.0]))
