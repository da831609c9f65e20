"""Test that MoE models in megatron-core's full-iteration graph are bit-identical to eager.

Layouts: data parallel and expert parallel over all GPUs. Models have 4 TransformerEngine layers, under Megatron-FSDP or
DistributedDataParallel. Warm-up steps run on the legacy default stream, as in ``megatron.training``.
"""

from typing import Any

import pytest

from tests.support.sample import name_of
from tests.support.trainings.compared import assert_as_eager
from tests.support.trainings.gpus import GPUS, SIZES

FULL: dict[str, Any] = SIZES | {"full_iteration": True, "dtype": "bf16", "experts": 8}
GROUPED: dict[str, Any] = {"moe_use_grouped_tensor": True}
CASES: list[dict[str, Any]] = [
    {"wrapper": wrapper, **case}
    for wrapper in ("fsdp", "ddp")
    for case in (
        GROUPED,
        GROUPED | {"microbatches": 2, "dropout": 0.1},
        GROUPED | {"moe_token_dispatcher_type": "allgather"},
        GROUPED | {"moe_shared_expert_intermediate_size": 256, "moe_shared_expert_overlap": True},
        GROUPED | {"gradient_accumulation_fusion": True},
        {"moe_expert_capacity_factor": 1.0},
    )
]
# Options and the minimum number of GPUs
LAYOUTS: dict[str, tuple[list[str], int]] = {"data parallel": ([], 1), "EP of all": (["--ep", str(GPUS)], 2)}
RUNS = [layout for layout, (_, gpus) in LAYOUTS.items() if gpus <= max(GPUS, 1)]


@pytest.mark.parametrize("layout", RUNS)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_full_iteration_is_bit_identical_to_eager(together, layout, case):
    result = together(FULL | case, [FULL | each for each in CASES], *LAYOUTS[layout][0])
    assert_as_eager(result)
    assert result["step_replays"] == [0] * 3 + [1] * 9
