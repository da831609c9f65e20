"""evaluation: what prevents graphs for evaluation."""

from types import SimpleNamespace

import pytest

from megatron.core.transformer._cuda_graphs.te.evaluation import against_evaluation_graphs
from megatron.core.transformer.enums import CudaGraphModule


def config(**changes):
    plain: dict[str, object] = {
        "fp8": None,
        "fp4": None,
        "delay_wgrad_compute": False,
        "fine_grained_activation_offloading": False,
        "cuda_graph_modules": [],
        "recompute_granularity": None,
        "mlp_chunks_for_training": 1,
    }
    return SimpleNamespace(**plain | changes)


def against(fine_grained=False, **changes):
    fsdp = SimpleNamespace(enable_fine_grained_param_gather_hook=fine_grained)
    return against_evaluation_graphs(config(**changes), fsdp)


@pytest.mark.parametrize(
    "changes",
    [{}, {"recompute_granularity": "selective"}, {"cuda_graph_modules": [CudaGraphModule.moe_router]}],
    ids=["layers", "recompute", "router"],
)
def test_evaluation_can_have_graphs(changes):
    assert against(**changes) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fp8": "hybrid"}, "FP8"),
        ({"fp4": "e2m1"}, "FP4"),
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
        ({"fine_grained_activation_offloading": True}, "offloaded"),
        ({"fine_grained": True}, "module by module"),
        ({"cuda_graph_modules": [CudaGraphModule.moe_router], "recompute_granularity": "selective"}, "MoE"),
        ({"cuda_graph_modules": [CudaGraphModule.moe_router], "mlp_chunks_for_training": 2}, "MoE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_reason_is_named_where_it_cannot(changes, reason):
    assert reason in against(**changes)
