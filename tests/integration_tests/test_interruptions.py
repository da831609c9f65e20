"""Test that interrupted runs with graphs continue bit-identically to eager runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pretraining import pretrain_with_user_code
from tests.support.pretraining.pretrain import Pretraining, numbers, pretrain
from tests.support.ranks.forked_ranks import OWN, ForkedRanks

USER_CODE = Path(pretrain_with_user_code.__file__)

STEPS = 9
CAPTURED_AFTER = 3


def test_rerun_step_replays_the_same_result(tmp_path):
    # If the wrong result of the second step is reproducible, the run ends with status 16.
    run = Pretraining(
        tmp_path,
        f"--train-iters {STEPS} --cuda-graph-warmup-steps 1 --rerun-mode validate_results --error-injection-rate 12 "
        f"--error-injection-type correct_result --save {tmp_path / 'saved'} --save-interval 1000",
        graphs=True,
    )
    run.ended()
    log = run.log.read_text()
    assert "exit code 16" in log, run.log_tail()
    assert re.search("Captured the whole model.*Unexpected result", log, re.DOTALL), run.log_tail()
    (unexpected,) = re.findall(r"Unexpected result ([0-9.]+) on rank", log)
    (again,) = re.findall(r"First rerun: .*\(([0-9.]+) = ", log)
    assert again == unexpected


@pytest.fixture(scope="module")
def diverging(tmp_path_factory):
    """Return a function that trains until the third loss is NaN and the run exits.

    The function returns the metrics of the finished steps, the rerun state machine's messages about NaN, and the log.
    """

    def run(flags: str, graphs: bool):
        folder = tmp_path_factory.mktemp("diverging")
        run = Pretraining(
            folder,
            f"--train-iters {STEPS} --iterations-to-skip 1 --lr 1e30 --cuda-graph-warmup-steps 1 "
            f"--save {folder / 'saved'} --save-interval 1000 {flags}",
            graphs=graphs,
        )
        run.ended()
        log = run.log.read_text()
        said = re.findall(r"rerun_state_machine:(.* nan .*)", log)
        assert len(said) >= 2 and "exit code 16" in log, run.log_tail()
        return numbers(run.steps()), sorted(said), log

    return run


@pytest.fixture(scope="module")
def diverging_eagerly(diverging):
    return diverging("", graphs=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "captured"),
    [
        ("--cuda-graph-layers-per-graph 1", "Captured 3 layers in"),
        ("", "Captured the whole model in"),
    ],
    ids=["layers", "model"],
)
def test_nan_loss_is_the_same_error_as_eagerly(diverging, diverging_eagerly, flags, captured):
    steps, said, _ = diverging_eagerly
    assert [step[0] for step in steps] == [2]
    assert any("Unexpected result nan on rank 1" in line and "the loss is NaN" in line for line in said)
    found_steps, found_said, log = diverging(flags, graphs=True)
    assert captured in log
    assert (found_steps, found_said) == (steps, said)


class Torchrun:
    """Starts CPU ranks with torchrun; has the interface of ``ForkedRanks``."""

    def __init__(self, arguments, log, ranks, environment):
        self._log = log
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*launcher, "-m", "megatron_fsdp_cuda_graphs.cpu_backend", *arguments],
                env=os.environ | OWN | environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
                stdout=file,
                stderr=file,
            )

    def ended(self, timeout):
        return self._process.wait(timeout)

    def log_tail(self):
        return self._log.read_text()[-12000:]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return pretrain(tmp_path_factory.mktemp("uninterrupted") / "run", f"--train-iters {STEPS}", graphs=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "launch", "last"),
    [("terminated_in_capture", ForkedRanks, CAPTURED_AFTER + 1), ("terminated_launcher", Torchrun, 5)],
)
def test_terminated_run_resumes_where_it_stopped(uninterrupted, tmp_path, monkeypatch, code, launch, last):
    monkeypatch.setenv("USER_CODE", code)
    (tmp_path / "ended").mkdir()
    flags = f"--train-iters {STEPS} --save {tmp_path / 'saved'} --save-interval 1000 --exit-signal-handler"
    run = Pretraining(tmp_path / "ended", flags, graphs=True, script=USER_CODE, launch=launch)
    run.ended()
    done = run.steps()
    assert [step["step"] for step in done] == [*range(1, last + 1)], run.log_tail()
    assert done[-1]["graphs"]
    resumed = pretrain(tmp_path / "resumed", f"--train-iters {STEPS} --load {tmp_path / 'saved'}", graphs=True)
    assert resumed[-1]["graphs"]
    assert numbers(done) + numbers(resumed) == numbers(uninterrupted)
