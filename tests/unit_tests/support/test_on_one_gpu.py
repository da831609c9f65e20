"""Cases of tests/gpu on one GPU: what is written, and which are trained again."""

import json
import sys

import pytest

from tests.support import on_one_gpu
from tests.support.gpus import ENGINES
from tests.support.on_one_gpu import Job

NO_MEMORY = "torch.OutOfMemoryError: CUDA out of memory"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the cases 0 to 11 of each engine; ``errors`` are those of the first and the later trainings of a case."""

    def run(errors, *arguments):
        chosen = [Job("test_a", engine, {"n": number}) for engine in ENGINES for number in range(12)]
        seen = []

        def train(part, folder):
            results = []
            for job in part:
                key = (job.engine, job.case["n"])
                again = key in seen
                seen.append(key)
                error = errors.get(key, ("", ""))[again]
                results.append({"tests": job.tests, "engine": job.engine, "case": str(key), "differences": []})
                results[-1] |= {"error": error, "control": ""}
            return results

        monkeypatch.setattr(on_one_gpu, "jobs", lambda: iter(chosen))
        monkeypatch.setattr(on_one_gpu, "train", train)
        monkeypatch.setattr(sys, "argv", ["on_one_gpu", "--output", str(tmp_path / "found.json"), *arguments])
        code = on_one_gpu.main()
        file = tmp_path / "found.json"
        return code, json.loads(file.read_text()) if file.exists() else None, seen

    return run


def test_every_case_is_in_the_file_and_in_its_command_is_what_was_chosen(run):
    code, found, seen = run({}, "--processes", "3")
    assert code == 0
    assert len(seen) == len(found["results"]) == found["cases"] == 24
    assert found["command"] == "python -m tests.support.on_one_gpu --processes 3"


def test_cases_of_one_engine_can_be_chosen(run):
    _, found, _ = run({}, "--engines", "native")
    assert {result["engine"] for result in found["results"]} == {"native"}
    assert found["cases"] == 12


def test_a_case_without_memory_is_trained_again_and_that_counts(run):
    code, found, seen = run({("native", 3): (NO_MEMORY, "")})
    assert code == 0
    assert seen.count(("native", 3)) == 2
    assert len(found["results"]) == 24


def test_a_case_that_failed_for_another_reason_or_again_has_failed(run):
    for errors in ("no", "no"), (NO_MEMORY, NO_MEMORY):
        code, found, _ = run({("native", 3): errors})
        assert code == 1
        assert [result["case"] for result in found["results"] if result["error"]] == ["('native', 3)"]


def test_what_there_was_no_time_for_did_not_run_and_is_no_success(run, capsys):
    code, found, seen = run({}, "--seconds", "74", "--engines", "native")
    assert code == 1
    assert seen == []
    assert "12 did not run" in capsys.readouterr().out
    assert found is None
