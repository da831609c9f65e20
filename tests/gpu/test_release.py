"""Test that ``release`` frees memory to the byte, and that training around it is bit-identical to eager training."""

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

SCRIPT = Path(launch.__file__).with_name("release_memory.py")
AROUND = SIZES | {"released": RELEASED, "steps": 8, "dropout": 0.1}
# The optimizer of FSDP2 does not move to the host, and dropless experts require bf16 on GPUs.
TRAINED = [AROUND | case | {"dtype": "bf16"} for case in CASES if case.get("wrapper") != "fsdp2"]


@pytest.mark.parametrize("case", TRAINED, ids=name_of)
def test_training_around_release_is_bit_identical(together, case):
    assert_as_eager(together(case, TRAINED))


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("case", PIPELINE, ids=name_of)
def test_pipelines_around_release_are_bit_identical(together, case):
    case, cases = AROUND | case, [AROUND | each for each in PIPELINE]
    assert_as_eager(together(case, cases, "--pp", "2", ranks=2))


@pytest.mark.parametrize("holds", ["model", "decoder", "layer"])
def test_release_frees_memory_to_the_byte(holds):
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
    assert [line["allocated"] for line in released] == [before["allocated"]] * len(released), done.stdout
    assert [line["reserved"] for line in released] == [before["reserved"]] * len(released), done.stdout
    assert max(line["restore"] for line in released) < 0.5
