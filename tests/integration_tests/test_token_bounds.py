"""Test that capture waits for a step within the token limit, and that later steps above the limit are rerun.

Two CPU ranks with two experts each train with dropout, router statistics, expert bias and two micro-batches. A rank
overflows by sending all its tokens to the experts of one rank.
"""

import json
import re
from pathlib import Path

import pytest

from tests.support.pretraining.pretrain import numbers, pretrain
from tests.support.sample import mostly_long

SCRIPT = Path(__file__).parents[1] / "support" / "pretraining" / "pretrain_overflowing.py"
STEPS, WARMUP = 7, 2
FLAGS = f"""
    --train-iters {STEPS} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --expert-model-parallel-size 2
    --moe-token-dispatcher-type alltoall --disable-bias-linear --moe-use-grouped-tensor
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
    --moe-router-enable-expert-bias --moe-router-score-function sigmoid --eval-iters 1 --eval-interval 3
"""
OVERFLOWS = {1: [0, 1], 2: [1], 4: [1], 5: [0], 6: [0, 1]}  # step 2 defers the capture until step 3 has ended
ALWAYS = 0.9  # capacity factor below an even share
GRAPHS = f"--cuda-graph-warmup-steps {WARMUP}"
KINDS = {
    "eager": "",
    "model": GRAPHS,
    "layers": f"{GRAPHS} --cuda-graph-layers-per-graph 1",
    "parts": f"{GRAPHS} --cuda-graph-modules attn moe_router moe_preprocess",
    "no warm-up": "--cuda-graph-warmup-steps 0",
    "eager recomputation": "--recompute-granularity selective --recompute-modules moe",
    "on devices": f"{GRAPHS} --disable-gloo-process-groups",
}
# The second rank overflows in one step, the last rank in the next; neither shares all groups with the others.
LAYOUTS = {
    "data parallel experts": (4, ""),
    "expert parallel": (4, "--expert-model-parallel-size 4"),
    "hybrid sharding": (4, "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim"),
    "optim": (2, "--data-parallel-sharding-strategy optim"),
}
OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather"
LOGGED = r"(?:lm loss|load_balancing_loss|z_loss|validation loss at iteration.*lm loss value): \S+"


class Run:
    """Finished training run.

    Attributes:
        steps: Metrics of each step.
        log: Output of the run.
        answers: For each attempt at a step, a pair per rank: the step, and whether the rank overflowed.
        found: Values to compare with another run: metrics, logged losses, and checksums of the routers' buffers.
    """

    def __init__(self, folder, flags, overflows, graphs, ranks=2):
        with pytest.MonkeyPatch.context() as patches:
            patches.setenv("OVERFLOWS", json.dumps(overflows))
            patches.setenv("NOTES_PATH", f"{folder}.notes")
            self.steps = pretrain(folder, f"{FLAGS} {flags}", graphs=graphs, script=SCRIPT, ranks=ranks)
        self.log = (folder / "log").read_text()
        notes = [Path(f"{folder}.notes.{rank}").read_text().splitlines() for rank in range(ranks)]
        *self.answers, _ = zip(*(map(json.loads, lines) for lines in notes), strict=True)
        buffers = [json.loads(lines[-1]) for lines in notes]
        self.found = numbers(self.steps), re.findall(LOGGED, self.log), buffers


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that trains with a capacity factor (None for no limit) and one of ``KINDS``; cache its runs."""
    done = {}

    def train(factor, kind, overflows=OVERFLOWS):
        key = factor, kind, *overflows
        if key not in done:
            folder = tmp_path_factory.mktemp("bounds") / "run"
            bounded = "" if factor is None else f"--moe-alltoall-capacity-factor {factor}"
            graphs = "eager" not in kind
            done[key] = Run(folder, f"{KINDS[kind]} {bounded}", overflows, graphs)
        return done[key]

    return train


@pytest.mark.parametrize("kind", mostly_long(KINDS, "model"))
def test_overflowing_steps_run_again(run, kind):
    bounded = run(1.9, kind)
    captured = STEPS + 1 if "eager" in kind else WARMUP + 1 if "warm" not in kind else 0
    expected = [
        [[step, rank in OVERFLOWS.get(step, [])] for rank in range(2)]
        for step in range(1, STEPS + 1)
        for _ in range(2 if step in OVERFLOWS and step > captured else 1)
    ]
    assert [[*each] for each in bounded.answers] == expected
    assert bounded.found == run(None, "eager").found
    assert ("Evaluation runs eagerly, because --moe" in bounded.log) == (kind in ("model", "on devices"))
    assert bounded.log.count("steps have been rerun") == (captured < STEPS)
    assert re.findall(r"sent another rank (\S+) times", bounded.log) == ["2.00"] * (captured == WARMUP + 1)
    assert [step["graphs"] > 0 for step in bounded.steps] == [step > captured for step in range(1, STEPS + 1)]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "runs"), [("model", 1), ("no warm-up", 2)])
def test_no_token_is_lost_if_all_steps_overflow(run, kind, runs):
    bounded = run(ALWAYS, kind, {})
    assert [any(found for _, found in each) for each in bounded.answers] == [True] * runs * STEPS
    assert bounded.found == run(None, "eager", {}).found


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_overflow_on_one_rank_repeats_the_step_on_all(tmp_path, layout):
    ranks, flags = LAYOUTS[layout]
    overflows = {4: [1], 5: [ranks - 1]}
    expected = Run(tmp_path / "eager", f"{flags} {OVERLAPPED}", overflows, False, ranks)
    bounded = f"{flags} {OVERLAPPED} {GRAPHS} --moe-alltoall-capacity-factor 1.9"
    found = Run(tmp_path / "graphs", bounded, overflows, True, ranks)
    assert [step for (step, _), *_ in found.answers] == [1, 2, 3, 4, 4, 5, 5, 6, 7]
    assert [[rank for rank, (_, answer) in enumerate(each) if answer] for each in found.answers] == [
        *([], [], [], [1], [1], [ranks - 1], [ranks - 1], [], [])
    ]
    assert found.found == expected.found
