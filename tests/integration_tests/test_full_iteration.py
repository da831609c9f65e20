"""Test that dropless experts in megatron-core's full-iteration graph are bit-identical to eager, on two CPU ranks.

``--moe-use-grouped-tensor`` keeps token counts on the GPU.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import assert_as_eager

FULL: dict[str, Any] = {
    "full_iteration": True,
    "dtype": "bf16",
    "layers": 2,
    "steps": 6,
    "microbatches": 2,
    "experts": 4,
    "moe_use_grouped_tensor": True,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("1", {}),
    ("2", {}),
    ("2", {"moe_token_dispatcher_type": "allgather", "unbalanced": True}),
    ("2", {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True, "mtp": 1}),
    ("1", {"wrapper": "ddp", "dropout": 0.1}),
    ("2", {"wrapper": "ddp"}),
    ("2", {"wrapper": "ddp", "moe_token_dispatcher_type": "allgather", "overlap_param_gather": False}),
]


@pytest.mark.parametrize(("ep", "case"), mostly_long(CASES, CASES[1]))
def test_full_iteration_is_bit_identical_to_eager(trained, ep, case):
    result = trained(FULL | case, "--ep", ep)
    assert_as_eager(result)
    assert result["step_replays"] == [0, 0, 0, 1, 1, 1]
