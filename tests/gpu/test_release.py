"""Test that ``release`` frees all memory, and that calling it between steps keeps training bit-identical."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration_tests.test_release import CASES, PIPELINE, RELEASED
from tests.support.ranks.forked_ranks import OWN
from tests.support.ranks.run_ranks import lines_of
from tests.support.sample import name_of
from tests.support.trainings import launch
from tests.support.trainings.compared import assert_as_eager
from tests.support.trainings.gpus import GPUS, SIZES

# Bytes that the first capture of a process leaves in small blocks, for example seeds of generators
LEFT = {"allocated": 11 * 512, "reserved": 2 << 20}
SCRIPT = Path(launch.__file__).with_name("release_memory.py")
AROUND = SIZES | {"released": RELEASED, "steps": 8, "dropout": 0.1}
# Dropless experts require bf16 on GPUs.
TRAINED = [AROUND | case | {"dtype": "bf16"} for case in CASES]


@pytest.mark.parametrize("case", TRAINED, ids=name_of)
def test_training_around_release_is_bit_identical(together, case):
    assert_as_eager(together(case, TRAINED))


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("case", PIPELINE, ids=name_of)
def test_pipelines_around_release_are_bit_identical(together, case):
    case, cases = AROUND | case, [AROUND | each for each in PIPELINE]
    assert_as_eager(together(case, cases, "--pp", "2", ranks=2))


@pytest.mark.parametrize("holds", ["model", "layer"])
def test_release_frees_all_memory_of_graphs(holds):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(GPUS)]
    done = subprocess.run(
        [*command, str(SCRIPT), "--holds", holds],
        env=os.environ | OWN,
        timeout=launch.TIMEOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    before, *released = [line for line in lines_of(done) if line["rank"] == 0]
    for kind, left in LEFT.items():
        assert len({line[kind] for line in released}) == 1, done.stdout
        assert released[0][kind] - before[kind] <= left, done.stdout
