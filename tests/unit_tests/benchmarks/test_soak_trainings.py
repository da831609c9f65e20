"""Tests of soak.py: concurrent runs on separate GPUs."""

import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("_soak.trainings")


class Process:
    """Fake launcher that waits for a second one, then writes its GPUs as metrics."""

    status = 0
    both = Barrier(2)

    def __init__(self, command, *, env, **others):
        self.env = env

    def wait(self):
        if not self.status:
            self.both.wait(600)
            Path(self.env["STEP_METRICS_PATH"]).write_text(json.dumps(self.env["CUDA_VISIBLE_DEVICES"]) + "\n")
        return self.status


@pytest.mark.parametrize(
    ("gpus", "at_once", "expected"),
    [(["3", "4", "5", "6", "7"], 2, ["3,4", "5,6"]), (["3", "4"], 2, ["3,4", "3,4"]), ([], 2, ["", ""])],
)
def test_concurrent_trainings_use_different_gpus(module, monkeypatch, tmp_path, gpus, at_once, expected):
    monkeypatch.setattr(module, "gpus", lambda: gpus)
    monkeypatch.setattr(module.subprocess, "Popen", Process)
    trainings = module.Trainings(2, at_once, tmp_path)
    with ThreadPoolExecutor(2) as pool:
        placed = list(pool.map(trainings.train, "ab", ["--flags"] * 2))
    assert sorted(placed) == [[place] for place in expected]


def test_failed_training_raises_its_log_and_frees_its_gpus(module, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "gpus", lambda: ["0", "1"])
    monkeypatch.setattr(module.subprocess, "Popen", type("Failing", (Process,), {"status": 1}))
    trainings = module.Trainings(2, 1, tmp_path)
    for name in "ab":
        with pytest.raises(RuntimeError, match=f"{name} failed"):
            trainings.train(name, "--flags")
