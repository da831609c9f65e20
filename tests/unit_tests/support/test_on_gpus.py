"""Cases of tests/gpu, many at a time: what is written, and which are trained again."""

import json
import sys
from types import SimpleNamespace

import pytest

from tests.support import on_gpus
from tests.support.gpus import ENGINES
from tests.support.on_gpus import Job

NO_MEMORY = "torch.OutOfMemoryError: CUDA out of memory"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the cases 0 to 11 of each engine; ``errors`` are those of the first and the later trainings of a case."""

    def run(errors, *arguments):
        chosen = [Job("test_a", "data parallel", engine, {"n": number}) for engine in ENGINES for number in range(12)]
        seen = []

        def train(part, folder):
            results = []
            for job in part:
                key = (job.engine, job.case["n"])
                again = key in seen
                seen.append(key)
                error = errors.get(key, ("", ""))[again]
                results.append({"tests": job.tests, "layout": job.layout, "engine": job.engine, "case": str(key)})
                results[-1] |= {"differences": [], "error": error, "control": ""}
            return results

        monkeypatch.setattr(on_gpus, "jobs", lambda: iter(chosen))
        monkeypatch.setattr(on_gpus, "train", train)
        monkeypatch.setattr(sys, "argv", ["on_gpus", "--output", str(tmp_path / "found.json"), *arguments])
        code = on_gpus.main()
        file = tmp_path / "found.json"
        return code, json.loads(file.read_text()) if file.exists() else None, seen

    return run


def test_every_case_is_in_the_file_and_in_its_command_is_what_was_chosen(run):
    code, found, seen = run({}, "--processes", "3")
    assert code == 0
    assert len(seen) == len(found["results"]) == found["cases"] == 24
    assert found["command"] == "python -m tests.support.on_gpus --processes 3"


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


@pytest.mark.parametrize(("found", "errors"), [(3, [False, False, True]), (1, [False, True, True])])
def test_a_launch_that_crashed_says_so(monkeypatch, tmp_path, found, errors):
    def launch(cases, *options, **others):
        return SimpleNamespace(returncode=-6, stdout="", stderr=""), [
            {"error": "", "differences": []} for _ in range(found)
        ]

    monkeypatch.setattr(on_gpus, "launch", launch)
    jobs = [Job("test_a", "data parallel", "native", {"n": number}) for number in range(3)]
    results = on_gpus.train(jobs, tmp_path / "logs")
    assert ["-6" in result["error"] for result in results] == errors


def test_shares_have_every_case_once(run):
    seen = [run({}, "--share", f"{part}/2")[2] for part in (1, 2)]
    assert all(seen)
    assert len({*seen[0], *seen[1]}) == len(seen[0]) + len(seen[1]) == 24


def test_a_launch_trains_cases_of_one_layout_and_engine():
    launches = [*on_gpus.together([*on_gpus.jobs()])]
    assert all(len({(job.options, job.variables, job.engine) for job in launch}) == 1 for launch in launches)
    assert max(map(len, launches)) == on_gpus.CASES
    assert sum(map(len, launches)) == len([*on_gpus.jobs()])
