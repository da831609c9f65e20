"""Test that training resumed in new processes continues bit-identically, eagerly and with graphs."""

import re

import pytest

from tests.support.pretraining.pretrain import SCHEDULE, numbers, pretrain
from tests.support.sample import mostly_long

# An evaluation ends step 4, before the checkpoint that the second run loads. Each rank holds all weights of some
# experts and empty shards of the others.
FLAGS = """
    --num-experts 4 --moe-token-dispatcher-type alltoall --moe-use-grouped-tensor --disable-bias-linear
    --swiglu --no-bias-swiglu-fusion --train-iters 9
    --eval-interval 4 --eval-iters 1 --eval-micro-batch-size 1 --split 80,10,10 --logging-level 20
"""
SAVED, CAPTURED_AFTER = 4, 3


def saves(folder):
    return f"--save {folder} --save-interval {SAVED}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def eager(folder):
    """Return the metrics of each step of an uninterrupted eager run that saves checkpoints."""
    return pretrain(folder / "eager", f"{FLAGS} {saves(folder / 'eagerly')}", graphs=False)


@pytest.fixture(scope="module")
def saving(folder):
    """Return the metrics of each step of an uninterrupted run with graphs that saves checkpoints."""
    return pretrain(folder / "saving", f"{FLAGS} {saves(folder / 'graphed')}", graphs=True)


@pytest.mark.long
def test_saving_run_is_bit_identical_to_eager(eager, saving):
    assert len(eager) == 9
    assert numbers(saving) == numbers(eager)
    assert [step["graphs"] > 0 for step in saving] == [step["step"] > CAPTURED_AFTER for step in saving]


@pytest.mark.long
def test_evaluations_replay_and_are_bit_identical_to_eager(folder, eager, saving):
    logs = [(folder / name / "log").read_text() for name in ("eager", "saving")]
    eagerly, graphed = (re.findall(r"validation loss at (.*?) \| lm loss value: (\S+)", log) for log in logs)
    assert len(eagerly) == 4  # after steps 4 and 8, and on two datasets after the last step
    assert graphed == eagerly
    assert ["Captured the whole model for evaluation" in log for log in logs] == [False, True]
    assert "run eagerly" not in logs[1]  # although their micro-batches differ from training


# Runs with graphs save RNG states in a different format.
@pytest.mark.parametrize(
    ("saved", "graphs"),
    mostly_long([("graphed", False), ("graphed", True), ("eagerly", True)], ("eagerly", True)),
)
def test_resumed_run_equals_an_uninterrupted_one(folder, eager, saved, graphs, request):
    if saved == "graphed":
        request.getfixturevalue("saving")
    flags = f"{FLAGS} --load {folder / saved} --ckpt-step {SAVED}"
    resumed = pretrain(folder / f"{saved}_{graphs}", flags, graphs=graphs)
    assert numbers(resumed) == numbers(eager)[SAVED:]
    assert bool(resumed[-1]["graphs"]) == graphs


# The loss scale starts at 2^20, and the first two steps overflow.
OVERFLOWS = "--train-iters 6 --fp16 --initial-loss-scale 1048576 --hysteresis 1"


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "ends"),
    [
        (OVERFLOWS, "--exit-interval 2"),
        ("--train-iters 6 --iterations-to-skip 1 2", "--train-iters 2"),
        ("--train-iters 6", "--exit-interval 1"),
        ("--train-iters 6", "--exit-duration-in-mins -1"),  # after the first step
        ("--train-iters 6 --iterations-to-skip 2 4", "--exit-interval 3"),
        # From step 5 on, each step has two micro-batches.
        (f"--train-samples 32 --lr-decay-samples 32 {SCHEDULE} 0:4,512:8", "--exit-interval 3"),
    ],
)
def test_run_interrupted_in_its_first_steps_resumes(tmp_path, flags, ends):
    flags = f"{flags} --cuda-graph-warmup-steps 1 --override-opt-param-scheduler"
    saving = f"{flags} {ends} --save {tmp_path / 'saved'} --save-interval 1000"
    eager = pretrain(tmp_path / "eager", flags, graphs=False)
    first = pretrain(tmp_path / "first", saving, graphs=True)
    resumed = pretrain(tmp_path / "resumed", f"{flags} --load {tmp_path / 'saved'}", graphs=True)
    assert numbers(first) + numbers(resumed) == numbers(eager)
    assert [step["skipped"] for step in first] == [flags.startswith(OVERFLOWS)] * len(first)
    assert not resumed[-1]["skipped"] and resumed[-1]["graphs"]
