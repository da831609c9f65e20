"""Test that grouped experts under Megatron-FSDP copy no weights and keep token counts on the GPU."""

import pytest
import torch

from megatron.core.transformer.moe import grouped_tensor
from megatron.core.transformer.moe.moe_layer import MoELayer

from .captured_training import captured
from .fsdp_variants import small

READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__")


def test_expert_weights_are_read_in_their_bucket(ranks, monkeypatch):
    read = []
    as_one = grouped_tensor.as_one

    def noted(weights):
        together = as_one(weights)
        read.append((together.untyped_storage().data_ptr(), weights[0].untyped_storage().data_ptr(), len(weights)))
        return together

    monkeypatch.setattr(grouped_tensor, "as_one", noted)
    with captured(small(experts=4, moe_use_grouped_tensor=True, holds="model")):
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
