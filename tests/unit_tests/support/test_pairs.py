"""Test that the sets of flags contain every pair of compatible features."""

import pytest

pytest.importorskip("megatron.core")

from tests.support import compatibility
from tests.support.pretraining import pairs

WORKING = {row.name for row in compatibility.WORKING}


def test_every_working_row_has_a_feature_or_an_exemption():
    rows = {name.partition(":")[0] for name in pairs.FEATURES}
    assert rows | {*pairs.ELSEWHERE} == WORKING | {"job"}
    assert rows.isdisjoint(pairs.ELSEWHERE)


def test_every_feature_is_in_a_stored_set():
    assert {name for names, _ in pairs.stored() for name in names} == {*pairs.FEATURES}


def test_command_merges_features_into_the_base():
    flags = pairs.command(["job: fp32", "tensor parallel", "router"])
    assert flags[flags.index("--tensor-model-parallel-size") + 1] == "2"
    assert flags[flags.index("--cuda-graph-modules") + 1] == "moe_router"
    assert "--bf16" not in flags
    assert flags[flags.index("--num-layers") + 1] == "4"
    assert flags.count("--num-layers") == 1
