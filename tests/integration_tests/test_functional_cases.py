"""The cases for the CPU backend train as their golden values say; one other bit is noticed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional_tests._runner.case import CASES
from tests.functional_tests._runner.machine import cpu_backend
from tests.support.launch import TIMEOUT

RUN = CASES.parent / "run.py"
GOLDEN = f"golden_values_{cpu_backend()}.json"
PASSING = [
    *(f"gpt_cpu_backend/{name}" for name in ("fsdp_whole_layers", "fsdp_resume", "fsdp_resume_eager")),
    "moe_cpu_backend/fsdp_parts",
]
CHANGED = "gpt_cpu_backend/fsdp_eager"
STEP = "5"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The ended runner and its results by case; of one case the golden loss of a step was changed a little."""
    folder = tmp_path_factory.mktemp("functional")
    for name in (*PASSING, CHANGED):
        (folder / name).mkdir(parents=True)
        shutil.copy(CASES / name / GOLDEN, folder / name)
    _change(folder / CHANGED / GOLDEN)
    output = folder / "results.json"
    done = subprocess.run(
        [sys.executable, str(RUN), *PASSING, CHANGED, "--golden", str(folder), "--output", str(output)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        timeout=TIMEOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert output.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return done, {result["case"]: result for result in json.loads(output.read_text())["results"]}


def _change(file: Path) -> None:
    values = json.loads(file.read_text())
    loss = float.fromhex(values["lm loss"][STEP])
    values["lm loss"][STEP] = (loss + 2**-20).hex()
    file.write_text(json.dumps(values))


@pytest.mark.parametrize("name", PASSING)
def test_a_case_has_its_golden_values(ended, name):
    result = ended[1][name]
    assert result["differences"] == [] and result["notes"] == []
    assert GOLDEN in result["compared with"]
    assert result["passed"]


def test_another_loss_fails_and_is_named(ended):
    done, results = ended
    result = results[CHANGED]
    assert not result["passed"]
    (line,) = result["differences"]
    assert line.startswith(f"lm loss {STEP}: ")
    assert line in done.stdout
    assert done.returncode == 1
