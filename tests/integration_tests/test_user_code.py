"""Test that graphs are bit-identical to eager with user code, and with flags that add work between steps.

Two CPU ranks run ``examples/pretrain_gpt.py``; each run combines many such flags and user functions. Every scalar that
Megatron writes is compared: losses, gradient norms, parameter norms, validation losses.
"""

import json
from pathlib import Path

import pytest

from tests.support.pretraining import pretrain_with_user_code
from tests.support.pretraining.pretrain import numbers, pretrain

STEPS, WARMUP = 7, 3
COMMON = f"--train-iters {STEPS} --cuda-graph-warmup-steps {WARMUP}"
# The profiler starts before the capture and stops after it; the batch size grows after it.
OBSERVED = f"""
    {COMMON} --log-params-norm --manual-gc --manual-gc-interval 2 --empty-unused-memory-level 2
    --log-memory-to-tensorboard --profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 5
    --profile-ranks 0 1 --full-validation --multiple-validation-sets --split 98,2,0 --eval-interval 3
    --rampup-batch-size 4 4 16
"""
EXPERTS = f"""
    {COMMON} --dataloader-type external --eval-interval 1 --eval-iters 1 --num-experts 4 --moe-router-topk 2
    --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall --disable-bias-linear --moe-use-grouped-tensor
    --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2
"""
TRAININGS = {
    "observed": ("averaged_weights unused_parameters masked_losses", OBSERVED),
    "experts": ("own_batches mean_losses weighted_by_a_first_pass shared_layers", EXPERTS),
}
DIFFER = ("mem-", "iteration-time")


class Run:
    """Finished training run, with the metrics of each step and the logged scalars."""

    def __init__(self, folder, training, graphs, more=""):
        code, flags = TRAININGS[training]
        with pytest.MonkeyPatch.context() as patches:
            patches.setenv("USER_CODE", code)
            patches.setenv("SCALARS_PATH", f"{folder}.scalars")
            self.steps = pretrain(
                folder,
                f"{flags} {more} --tensorboard-dir {folder / 'tensorboard'}",
                graphs=graphs,
                script=Path(pretrain_with_user_code.__file__),
            )
        scalars = [json.loads(line) for line in Path(f"{folder}.scalars").read_text().splitlines()]
        self.names = {name for _, name, *_ in scalars}
        self.averages = {value for _, name, value, _ in scalars if name == "averages"}
        compared = sorted(scalar for scalar in scalars if not scalar[1].startswith(DIFFER))
        self.found = numbers(self.steps), compared


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """Return a function that trains one of ``TRAININGS`` eagerly and caches its ``Run``."""
    done = {}

    def run(training):
        if training not in done:
            done[training] = Run(tmp_path_factory.mktemp(training) / "eager", training, graphs=False)
        return done[training]

    return run


def assert_as_eager(eager, folder, training, more, graphs):
    run = Run(folder / "graphed", training, graphs=True, more=more)
    assert run.found == eager(training).found
    assert [step["graphs"] for step in run.steps] == [0] * WARMUP + [graphs] * (STEPS - WARMUP)
    return run


@pytest.mark.parametrize(
    ("more", "graphs"),
    [
        ("", 1),
        pytest.param("--cuda-graph-layers-per-graph 1", 3, marks=pytest.mark.long),
        pytest.param("--cuda-graph-modules mlp", 3, marks=pytest.mark.long),
    ],
    ids=["model", "layers", "parts"],
)
def test_user_code_between_steps_is_bit_identical_to_eager(eager, tmp_path, more, graphs):
    run = assert_as_eager(eager, tmp_path, "observed", more, graphs)
    assert run.names >= {"params-norm", "mem-reserved-bytes", "lm loss validation-0", "largest loss"}
    assert len(run.averages) == 2 * STEPS  # differs between ranks and steps
    assert len([*(tmp_path / "graphed" / "torch_profile").iterdir()]) == 2


@pytest.mark.long
def test_modules_called_twice_are_bit_identical_to_eager(eager, tmp_path):
    run = assert_as_eager(eager, tmp_path, "experts", "", graphs=1)
    assert run.names >= {"global_load_balancing_loss", "lm loss validation"}
