"""Tests that ``TECudaGraphHelper`` validates options without Megatron's argument parser."""

import pytest

from tests.unit_tests.core.distributed.fsdp_variants import Variant, small

pytestmark = pytest.mark.usefixtures("side_stream")

DOUBLE_BUFFER = {"fsdp_double_buffer": True}
FALLBACK = {"fsdp_db_use_persist_buf_on_alloc_fail": True}
NEITHER = {"fsdp_double_buffer": False, "fsdp_db_use_persist_buf_on_alloc_fail": False}


def helper(sharding):
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    variant = Variant(small(), sharding=NEITHER | sharding)
    model = variant.build(graphs=True)
    return TECudaGraphHelper([model], model.config, variant.case.sequence, variant.case.micro_batch)


def test_missing_option_is_named(ranks):
    with pytest.raises(ValueError, match="--fsdp-double-buffer") as error:
        helper(FALLBACK)
    assert "--fsdp-db-use-persist-buf-on-alloc-fail" not in str(error.value)


def test_complete_options_are_accepted(ranks):
    assert len(helper(DOUBLE_BUFFER | FALLBACK).flattened_callables) == 2
