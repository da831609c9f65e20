"""Test that packed sequences of varying lengths train bit-identically to eager with graphs, on two CPU ranks.

A stand-in replaces TransformerEngine's attention, the only one that supports packed sequences.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import assert_as_eager, captures_model, replays_of_evaluations

SIZES: dict[str, Any] = {"layers": 3, "steps": 6, "micro_batch": 1, "packed": 5, "positions": "none"}
LEARNED = {"positions": "learned_absolute", "dtype": "bf16", "dropout": 0.1, "microbatches": 2}
# Each case, with its forward replays per micro-batch
CASES: list[tuple[dict[str, Any], int]] = [
    ({"holds": "layer", "mtp": 1}, 4),
    ({"holds": "model", **LEARNED, "evaluates": True}, 1),
    ({"holds": None, "mtp": 2}, 1),
    ({"holds": "model", "pattern": "*-*-", "microbatches": 2}, 1),
    ({"modules": ["attn"], "dropout": 0.1, "microbatches": 2}, 3),
    ({"modules": ["mlp"], "microbatches": 2}, 3),
    ({"modules": ["attn", "moe_router", "moe_preprocess"], "experts": 4}, 3),
    ({"wrapper": "ddp", "dtype": "bf16", "microbatches": 2}, 3),
]
OTHER_SHAPES: list[dict[str, Any]] = [
    {"sequences_later": [32, 16], "dropout": 0.1, "holds": most} for most in ("layer", "model")
]
# Each of two context-parallel ranks holds parts of each sequence.
CP: list[tuple[dict[str, Any], int]] = [
    ({"holds": "layer", "mtp": 1}, 4),
    ({"microbatches": 2, "dtype": "bf16"}, 1),
    ({"holds": None, "mtp": 2, **LEARNED, "evaluates": True}, 1),
    ({"holds": "model", "pattern": "*-*-", "sequences_later": [16, 32]}, 1),
    ({"holds": "model", "fp8": "delayed"}, 1),
]
STAGES: dict[str, Any] = {"layers": 4, "tied": False, "microbatches": 4, "dropout": 0.1}


def assert_replayed(result, case, pieces):
    assert_as_eager(result)
    layers = len(case.get("pattern", "")) or SIZES["layers"] + case.get("mtp", 0)
    whole = captures_model(case)
    assert result["graphs"] == (0 if whole else layers)
    assert result["evaluation_replays"] == replays_of_evaluations(SIZES | case, layers if whole else 0)
    assert result["replays"] == 2 * pieces * case.get("microbatches", 1)


@pytest.mark.parametrize(("case", "pieces"), mostly_long(CASES, CASES[1]))
def test_one_capture_serves_all_lengths(trained, case, pieces):
    assert_replayed(trained(SIZES | case), case, pieces)


@pytest.mark.long
@pytest.mark.parametrize(("case", "pieces"), CP)
def test_one_capture_serves_all_lengths_with_context_parallelism(trained, case, pieces):
    assert_replayed(trained(SIZES | case, "--cp", "2"), case, pieces)


@pytest.mark.long
@pytest.mark.parametrize("case", OTHER_SHAPES)
def test_batches_of_another_length_run_eagerly(trained, case):
    result = trained(SIZES | case)
    assert_as_eager(result)
    pieces = 3 if case["holds"] == "layer" else 1
    assert result["step_replays"] == [0, 0, 0, 2 * pieces, 2 * pieces, 0]


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--cp", "2")], ids=["whole sequences", "parts"])
def test_pipeline_stages_take_packed_sequences(trained, options):
    layers, chunks = (
        trained(SIZES | STAGES | {"holds": most}, "--pp", "2", *options, ranks=4 if options else 2)
        for most in ("layer", "model")
    )
    assert_as_eager(layers)
    assert_as_eager(chunks)
    assert (layers["graphs"], layers["replays"]) == (2 * 4, 2 * 2 * 4)  # layers per stage, micro-batches
    assert (chunks["graphs"], chunks["replays"]) == (0, 2 * 4)


def test_host_read_of_lengths_fails_the_capture_and_is_named(trained):
    error = trained(SIZES | {"positions": "rope"})["error"]
    assert "CaptureFailedError" in error
    assert "Tensor.tolist copies device data to the host" in error
