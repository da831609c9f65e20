"""Test that Megatron's loop writes CUDA graph scalars to TensorBoard and W&B at its interval and at the end.

The last of two CPU ranks has the writers.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.pretraining import pretrain_with_writers
from tests.support.pretraining.pretrain import pretrain

TRAIN = "--train-iters 9 --cuda-graph-warmup-steps 3 --eval-interval 4 --eval-iters 1"
WRITERS = "--tensorboard-log-interval 2 --wandb-project project --wandb-exp-name name"
EVERY = [2, 4, 6, 8]
LAST = 9
MICROBATCHES = 2


@pytest.fixture(scope="module")
def scalars(tmp_path_factory):
    """Return the values of all scalars by writer and name."""
    folder = tmp_path_factory.mktemp("scalars")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SCALARS_PATH", str(folder / "scalars"))
        flags = f"{TRAIN} {WRITERS} --tensorboard-dir {folder} --wandb-save-dir {folder}"
        pretrain(folder / "run", flags, graphs=True, script=Path(pretrain_with_writers.__file__))
    values = defaultdict(list)
    for line in (folder / "scalars").read_text().splitlines():
        writer, name, value, iteration = json.loads(line)
        values[writer, name].append((iteration, value))
    return values


@pytest.mark.long
@pytest.mark.parametrize("writer", ["tensorboard", "wandb"])
def test_scalars_follow_the_log_interval(scalars, writer):
    assert [iteration for iteration, _ in scalars[writer, "learning-rate"]] == EVERY
    own = {name.removeprefix("cuda-graphs/"): each for (by, name), each in scalars.items() if by == writer}
    replays = [MICROBATCHES * steps for steps in (0, 1, 2, 2, 1)]
    written = [*EVERY, LAST]
    assert own["replays"] == list(zip(written, replays, strict=True))
    assert own["eager-steps/before-capture"] == list(zip(written, [2, 1, 0, 0, 0], strict=True))
    assert own["captures"] == list(zip(written, [0, 1, 1, 1, 1], strict=True))
    memory = dict(own["memory-mib"])
    assert memory.keys() == {*written}
    assert memory[2] == 0 < memory[4] <= memory[8]
