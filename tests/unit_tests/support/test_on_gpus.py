"""Test the concurrent training of the GPU test cases."""

import json
import sys
from types import SimpleNamespace

import pytest

from tests.support.trainings import on_gpus
from tests.support.trainings.on_gpus import Job

NO_MEMORY = "torch.OutOfMemoryError: CUDA out of memory"


@pytest.fixture
def run(monkeypatch, tmp_path):
    def run(errors, *arguments):
        """Run twelve fake cases; return the exit code, the results, and the case numbers in training order.

        ``errors`` maps a case number to the errors of its first run and of later runs.
        """
        chosen = [Job("test_a", "data parallel", {"n": number}) for number in range(12)]
        seen = []

        def train(part, folder):
            results = []
            for job in part:
                number = job.case["n"]
                error = errors.get(number, ("", ""))[number in seen]
                seen.append(number)
                results.append({"tests": job.tests, "layout": job.layout, "case": str(number), "control": ""})
                results[-1] |= {"differences": [], "error": error}
            return results

        monkeypatch.setattr(on_gpus, "jobs", lambda: iter(chosen))
        monkeypatch.setattr(on_gpus, "train", train)
        monkeypatch.setattr(sys, "argv", ["on_gpus", "--output", str(tmp_path / "found.json"), *arguments])
        code = on_gpus.main()
        return code, json.loads((tmp_path / "found.json").read_text()), seen

    return run


@pytest.mark.parametrize("errors", [("no", "no"), (NO_MEMORY, NO_MEMORY)])
def test_other_and_repeated_errors_are_failures(run, errors):
    code, found, _ = run({3: errors})
    assert code == 1
    assert [result["case"] for result in found["results"] if result["error"]] == ["3"]


@pytest.mark.parametrize(("found", "errors"), [(3, [False, False, True]), (1, [False, True, True])])
def test_crashed_launch_is_an_error(monkeypatch, tmp_path, found, errors):
    def launch(cases, *options, **others):
        return SimpleNamespace(returncode=-6, stdout="", stderr=""), [
            {"error": "", "differences": []} for _ in range(found)
        ]

    monkeypatch.setattr(on_gpus, "launch", launch)
    jobs = [Job("test_a", "data parallel", {"n": number}) for number in range(3)]
    results = on_gpus.train(jobs, tmp_path / "logs")
    assert ["-6" in result["error"] for result in results] == errors


def test_shares_partition_the_cases(run):
    seen = [run({}, "--share", f"{part}/2")[2] for part in (1, 2)]
    assert all(seen)
    assert len({*seen[0], *seen[1]}) == len(seen[0]) + len(seen[1]) == 12


def test_launches_train_cases_of_one_layout():
    launches = [*on_gpus.together([*on_gpus.jobs()])]
    assert all(len({(job.options, job.variables) for job in launch}) == 1 for launch in launches)
    assert max(map(len, launches)) == on_gpus.CASES
    assert sum(map(len, launches)) == len([*on_gpus.jobs()])
