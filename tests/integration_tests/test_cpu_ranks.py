"""Two ranks of the CPU backend: collectives that were written for NCCL, and a training."""

import math
from pathlib import Path

import pytest

from tests.support.ranks.run_ranks import on_two_ranks

HERE = Path(__file__).parent
CASES = [
    "backends",
    "premultiplied_sum",
    "average",
    "coalesced",
    "results_are_held_until_wait",
    "coalesced_results_are_held_until_wait",
    "a_rank_keeps_its_part_of_what_is_gathered_in_place",
    "a_result_is_no_new_version_of_its_tensor",
    "a_polled_or_awaited_future_hands_out_its_results",
    "a_send_that_nobody_waits_for_arrives",
    "every_group_has_one_thread",
    "groups_share_the_device",
    "low_precision",
    "meshes",
    "captured",
    "a_forgotten_wait_in_a_capture",
    "a_capture_waits_for_no_other_rank",
    "barrier_in_a_capture",
]


@pytest.fixture(scope="module")
def collectives():
    """The output of the run of all collective cases; the first that fails ends it."""
    return on_two_ranks(str(HERE / "ranks_collectives.py"))


@pytest.mark.parametrize("case", CASES)
def test_collectives_written_for_nccl_work(collectives, case):
    assert f"passed: {case}\n" in collectives.stdout, collectives.stderr[-3000:]


def test_a_gpt_trains_under_megatron_fsdp():
    run = on_two_ranks(str(HERE / "ranks_fsdp.py"))
    assert run.returncode == 0, run.stderr[-3000:]
    losses = [float(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("loss")]
    assert len(losses) == 8
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.9 * losses[0]
