"""Test that experts under Megatron-FSDP copy no weights, keep token counts on the GPU and free autograd graphs."""

import gc

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from megatron.core.transformer.moe import grouped_tensor
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter

from .captured_training import captured
from .fsdp_variants import FULL_RECOMPUTE, Variant, run_backward, small

READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__")


@pytest.mark.parametrize("recompute", [{}, FULL_RECOMPUTE], ids=["", "recomputed"])
def test_expert_weights_are_read_in_their_bucket(ranks, monkeypatch, recompute):
    read = []
    as_one = grouped_tensor.as_one

    def noted(weights):
        together = as_one(weights)
        read.append((together.untyped_storage().data_ptr(), weights[0].untyped_storage().data_ptr(), len(weights)))
        return together

    monkeypatch.setattr(grouped_tensor, "as_one", noted)
    with captured(small(experts=4, moe_use_grouped_tensor=True, holds="model", **recompute)):
        assert read
    assert all(mine == theirs and experts == 4 for mine, theirs, experts in read)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_eager_moe_layer_does_not_synchronize(ranks, monkeypatch, dispatcher):
    synchronized: list[str] = []
    inside = MoELayer.forward

    def noting(name):
        method = getattr(torch.Tensor, name)

        def noted(*given):
            synchronized.append(name)
            return method(*given)

        return noted

    def watched(layer, *args, **kwargs):
        with pytest.MonkeyPatch.context() as patches:
            for name in READS:
                patches.setattr(torch.Tensor, name, noting(name))
            return inside(layer, *args, **kwargs)

    monkeypatch.setattr(MoELayer, "forward", watched)
    flags = {"experts": 4, "moe_token_dispatcher_type": dispatcher, "modules": ("attn",)}
    with captured(small(moe_use_grouped_tensor=True, **flags)) as model:
        model.step()
    assert not synchronized
    with captured(small(**flags)) as model:
        model.step()
    assert "tolist" in synchronized


# AccumulateGrad nodes that outlive a step on the legacy default stream end the capture of a full iteration.
@pytest.mark.parametrize(
    "flags",
    [
        {"moe_use_grouped_tensor": True},
        {"moe_use_grouped_tensor": True, "moe_token_dispatcher_type": "allgather"},
        {
            "moe_use_grouped_tensor": True,
            "moe_shared_expert_intermediate_size": 64,
            "moe_shared_expert_overlap": True,
        },
        {"moe_expert_capacity_factor": 1.0},
    ],
)
def test_autograd_graph_of_a_step_is_freed(ranks, flags):
    case = small(experts=4, **flags)
    model = Variant(case).build()
    marked = []

    def mark(router, *_):
        get_gradient_edge(router.weight).node.metadata["old"] = True
        marked.append(router.weight)

    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(mark)
    run_backward(model, case)
    gc.collect()
    assert len(marked) == case.layers
    assert not any("old" in get_gradient_edge(weight).node.metadata for weight in marked)
