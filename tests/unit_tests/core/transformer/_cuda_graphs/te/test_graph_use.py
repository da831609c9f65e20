"""Test graph usage counters: replays, eager steps, captures and memory.

One rank trains three layers on the CPU backend.
"""

from collections import Counter

import pytest
import torch

from megatron.core.transformer._cuda_graphs.te import capture_session, capture_state
from megatron.core.transformer._cuda_graphs.te.capture_state import (
    BEFORE_CAPTURE,
    CAPTURE_FAILED,
    OTHER_INPUTS,
    GraphUse,
)
from tests.unit_tests.core.distributed.captured_training import CapturedTraining, graphed
from tests.unit_tests.core.distributed.fsdp_variants import small

pytestmark = pytest.mark.usefixtures("side_stream")

FORWARD_REPLAYS = {"decoder": 1, "layer": 3, "model": 1}  # per micro-batch, by scope of a graph
MICROBATCHES = 2


@pytest.fixture
def training(one_rank):
    """Yield a function that captures a case; free the graphs after the test."""
    made = []

    def make(case):
        made.append(CapturedTraining(case))
        return made[-1]

    yield make
    for each in made:
        each.delete()


def pools():
    """Return the size in bytes of each memory pool."""
    sizes: Counter[tuple] = Counter()
    for segment in torch.cuda.memory_snapshot():
        sizes[tuple(segment["segment_pool_id"])] += segment["total_size"]
    return sizes


@pytest.mark.parametrize("holds", FORWARD_REPLAYS)
def test_replays_count_forward_graphs(training, holds):
    trained = training(graphed(holds, microbatches=MICROBATCHES))
    helper = trained.helper
    assert (helper.graph_use().replays, helper.eager_reason()) == (0, "")
    for steps in (1, 2):
        trained.step()
        assert helper.graph_use().replays == steps * MICROBATCHES * FORWARD_REPLAYS[holds]
        assert helper.eager_reason() == ""


@pytest.mark.parametrize("holds", ["decoder", "model"])
def test_counters_continue_after_recapture(training, holds):
    trained = training(graphed(holds))
    helper = trained.helper
    trained.step()
    helper.delete_cuda_graphs()
    assert helper.graph_use() == GraphUse(replays=1, captures=1, pool_bytes=0)
    assert helper.eager_reason() == BEFORE_CAPTURE
    trained.capture(lambda training: training.helper.create_cudagraphs())
    trained.step()
    use = helper.graph_use()
    assert (use.replays, use.captures) == (2, 2)
    assert use.pool_bytes > 0


@pytest.mark.parametrize("holds", ["decoder", "model"])
def test_step_of_another_shape_has_other_inputs(training, holds):
    trained = training(small(layers=3, warmup=0, sequences_later=(8, 16), holds=holds))
    seen = []
    for _ in range(3):
        trained.step()
        seen.append((trained.helper.eager_reason(), trained.helper.graph_use().replays))
    assert seen == [(OTHER_INPUTS, 0), ("", 1), (OTHER_INPUTS, 1)]


def test_failed_capture_is_the_eager_reason(training, monkeypatch):
    trained = training(graphed())
    helper = trained.helper
    helper.delete_cuda_graphs()
    helper.config.cuda_graph_fallback = "eager"
    with monkeypatch.context() as patched:
        patched.setattr(capture_session.CaptureSession, "capture", lambda *_: 1 / 0)
        helper.create_cudagraphs()
    assert helper.eager_reason() == CAPTURE_FAILED
    assert helper.graph_use() == GraphUse(replays=0, captures=1, pool_bytes=0)


def test_pool_bytes_are_read_once(training, monkeypatch):
    others = pools().keys() | {(0, 0)}  # the allocator's default pool, and pools of graphs from earlier tests

    def of_graphs():
        return sum(size for pool, size in pools().items() if pool not in others)

    trained = training(graphed())
    before = trained.helper.graph_use().pool_bytes
    assert before == of_graphs() > 0
    with monkeypatch.context() as patched:
        patched.setattr(capture_state, "pools_of", lambda graphs: pytest.fail("the allocator was queried again"))
        trained.step()
        assert trained.helper.graph_use().pool_bytes == before
