"""Packed sequences of other lengths in every micro-batch train with graphs bit for bit as eagerly, on two CPU ranks.

Attention stands for TransformerEngine's, which alone takes packed sequences. Capture is after 3 steps.
"""

from typing import Any

import pytest

from tests.support.documents import write_documents
from tests.support.pretraining.pretrain import numbers, pretrain
from tests.support.sample import mostly_long
from tests.support.trainings.compared import Trained, assert_as_eager
from tests.support.trainings.evaluations import replays_of_evaluations
from tests.support.trainings.launch import name_of

SIZES: dict[str, Any] = {"layers": 3, "steps": 6, "micro_batch": 1, "packed": 5, "positions": "none"}
LEARNED = {"positions": "learned_absolute", "dtype": "bf16", "dropout": 0.1, "microbatches": 2}
# With each case how many forward graphs are replayed in a micro-batch.
CASES: list[tuple[dict[str, Any], int]] = [
    ({}, 1),
    ({**LEARNED, "evaluates": True}, 1),
    ({"holds": "layer", "mtp": 1}, 4),
    ({"mtp": 1, **LEARNED}, 2),
    ({"holds": "model", **LEARNED, "evaluates": True}, 1),
    ({"holds": None, "mtp": 2}, 1),
    ({"holds": "model", "pattern": "*-*-", "microbatches": 2}, 1),
    ({"modules": ["attn"], "dropout": 0.1, "microbatches": 2}, 3),
    ({"modules": ["mlp"], "microbatches": 2}, 3),
    ({"modules": ["attn", "moe_router", "moe_preprocess"], "experts": 4}, 3),
    ({"modules": ["moe_router"], "experts": 4}, 3),
    ({"pattern": "*-*-", "microbatches": 2}, 1),
    ({"fsdp": False, "dtype": "bf16", "microbatches": 2}, 3),
]
OTHER_SHAPES: list[dict[str, Any]] = [
    {"sequences_later": [32, 16], "dropout": 0.1, "holds": most} for most in ("layer", "decoder", "model")
]
# Each of two context-parallel ranks has parts of each sequence.
PARTS: list[tuple[dict[str, Any], int]] = [
    ({"holds": "layer", "mtp": 1}, 4),
    ({"microbatches": 2, "dtype": "bf16"}, 1),
    ({"holds": None, "mtp": 2, **LEARNED, "evaluates": True}, 1),
    ({"holds": "model", "pattern": "*-*-", "sequences_later": [16, 32]}, 1),
    (
        {
            "holds": "model",
            "config": ["recompute_granularity='full'", "recompute_method='uniform'", "recompute_num_layers=1"],
        },
        1,
    ),
    ({"holds": "model", "fp8": "delayed"}, 1),
]
# With each layout of ranks how many graphs of layers a rank has; layers and micro-batches are four in stages.
LAYOUTS = {
    "": 3,
    "--tensor-model-parallel-size 2": 3,
    "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
    " --untie-embeddings-and-output-weights": 2 * 4,
}
STAGES: dict[str, Any] = {"layers": 4, "tied": False, "microbatches": 4, "dropout": 0.1}


@pytest.fixture(scope="module")
def results(compare_runs):
    """The result of each case on data-parallel ranks, by its name."""
    return Trained([*(case for case, _ in CASES), *OTHER_SHAPES], compare_runs, SIZES)


@pytest.fixture(scope="module")
def parts(compare_runs):
    """The result of each case on context-parallel ranks, by its name."""
    return Trained([case for case, _ in PARTS], compare_runs, SIZES, "--cp", "2")


def assert_equal(result):
    assert_as_eager(result)
    assert len(result["losses"]) == SIZES["steps"]


@pytest.mark.parametrize(
    ("case", "pieces"),
    mostly_long(CASES, CASES[4], CASES[-1]),
    ids=[name_of(case) or "whole layers" for case, _ in CASES],
)
def test_one_capture_serves_all_lengths(results, case, pieces):
    result = results[name_of(case)]
    assert_equal(result)
    layers = len(case.get("pattern", "")) or SIZES["layers"] + case.get("mtp", 0)
    whole = case.get("holds", "decoder") in (None, "model")
    assert result["graphs"] == (0 if whole else layers)
    assert result["evaluation_replays"] == replays_of_evaluations(SIZES | case, layers if whole else 0)
    assert result["replays"] == 2 * pieces * case.get("microbatches", 1)


@pytest.mark.parametrize(("case", "pieces"), mostly_long(PARTS, PARTS[2]), ids=[name_of(case) for case, _ in PARTS])
def test_one_capture_serves_all_lengths_of_which_ranks_have_parts(parts, case, pieces):
    result = parts[name_of(case)]
    assert_equal(result)
    layers = len(case.get("pattern", "")) or SIZES["layers"] + case.get("mtp", 0)
    assert result["evaluation_replays"] == replays_of_evaluations(SIZES | case, layers)
    assert result["replays"] == 2 * pieces * case.get("microbatches", 1)


@pytest.mark.parametrize("case", mostly_long(OTHER_SHAPES, OTHER_SHAPES[-1]), ids=name_of)
def test_batches_of_another_length_run_eagerly(results, case):
    result = results[name_of(case)]
    assert_equal(result)
    pieces = 3 if case["holds"] == "layer" else 1
    assert result["step_replays"] == [0, 0, 0, 2 * pieces, 2 * pieces, 0]


@pytest.mark.long
@pytest.mark.parametrize("parts", [(), ("--cp", "2")], ids=["whole sequences", "parts"])
def test_pipeline_stages_read_packed_sequences_too(compare_runs, parts):
    cases = [SIZES | STAGES | {"holds": most} for most in ("layer", "model")]
    layers, chunks = compare_runs(cases, "--pp", "2", *parts, ranks=4 if parts else 2)
    for result in (layers, chunks):
        assert_equal(result)
    assert (layers["graphs"], layers["replays"]) == (2 * 4, 2 * 2 * 4)  # layers of a stage, micro-batches
    assert (chunks["graphs"], chunks["replays"]) == (0, 2 * 4)


def test_where_the_host_reads_lengths_the_capture_fails_and_names_it(compare_runs):
    (result,) = compare_runs([SIZES | {"positions": "rope"}])
    assert "CaptureFailedError" in result["error"]
    assert "Tensor.tolist copies device data to the host" in result["error"]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS, ids=["data parallel", "tensor parallel", "four stages on two ranks"])
def test_pretraining_with_attention_within_documents_is_bit_equal_to_eager(tmp_path, layout):
    data = write_documents(tmp_path / "documents", count=500, longest=20)  # several in each sample
    flags = f"""
        {layout} --train-iters 6 --cuda-graph-warmup-steps 2 --eval-iters 1 --eval-interval 4 --micro-batch-size 1
        --global-batch-size 4 --dataloader-inter-document-masking --cuda-graph-packed-sequences 32
        --spec tests.support.layers.packed_attention local_layer --position-embedding-type learned_absolute
    """
    eager = pretrain(tmp_path / "eager", flags, graphs=False, data=data)
    graphed = pretrain(tmp_path / "graphed", flags, graphs=True, data=data)
    assert len(eager) == 6
    assert numbers(graphed) == numbers(eager)
    assert [step["graphs"] for step in graphed] == [0] * 2 + [LAYOUTS[layout]] * 4
