"""Output, files and exit codes of the runner."""

import json

import pytest

from tests.functional_tests import run
from tests.functional_tests._runner import machine
from tests.functional_tests._runner.machine import Machine

EAGER, GRAPHED = "gpt_cpu_backend/fsdp_eager", "gpt_cpu_backend/fsdp_whole_layers"


@pytest.fixture
def runner(make_found, tmp_path, monkeypatch):
    """Return a function that calls ``main`` with given losses of cases; golden values are in ``tmp_path``."""
    trained: list[list[str]] = []

    def call(*arguments: str, gpus: int = 0, **losses: list[float]) -> int:
        def train(cases, *, ended, **how):
            trained.append([case.name for case in cases])
            found = {}
            for case in cases:
                values = losses.get(case.name.split("/")[1], [2.0] * 8)
                found[case.name] = make_found(*values, graphs=int(case.graphs != "none"))
                ended(case, found)

        monkeypatch.setattr(run, "train", train)
        monkeypatch.setattr(machine, "_importable", lambda package: True)
        monkeypatch.setattr(run, "this_machine", lambda: Machine(gpus, "h200" if gpus else "cpu_backend"))
        return run.main([*arguments, "--golden", str(tmp_path)])

    call.trained = trained  # type: ignore[attr-defined]
    return call


def test_recorded_values_match_the_same_run_only(runner, capsys):
    assert runner(GRAPHED, EAGER, "--record") == 0
    assert runner(GRAPHED, EAGER) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        [EAGER, "yes"],
        [GRAPHED, "yes"],
    ]
    assert runner(EAGER, fsdp_eager=[2.0] * 7 + [1.0]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("    lm loss 8: 0x1.0") for line in lines)
    assert lines[-1].split()[:2] == [EAGER, "NO"]


def test_graphs_that_differ_from_eager_are_not_recorded(runner, tmp_path):
    assert runner(GRAPHED, "--record", fsdp_whole_layers=[2.0] * 7 + [1.0]) == 1
    assert runner.trained == [[EAGER, GRAPHED]]
    assert not list(tmp_path.rglob("golden_values_*"))


def test_cpu_backend_compares_graphed_cases_with_eager(runner, capsys):
    assert runner(GRAPHED, "--record") == 0
    rounded = [2.0] * 7 + [2.0 + 2**-22]
    assert runner(GRAPHED, fsdp_eager=rounded, fsdp_whole_layers=rounded) == 0
    assert runner(GRAPHED, fsdp_whole_layers=rounded) == 1
    assert f"{EAGER} 0x1.0" in capsys.readouterr().out
    assert runner.trained == [[EAGER, GRAPHED]] * 3


def test_skipped_case_is_listed_with_the_reason(runner, capsys, tmp_path):
    output = tmp_path / "results.json"
    assert runner("gpt/hsdp_eager", GRAPHED, "--against-eager", "--output", str(output)) == 0
    assert "gpt/hsdp_eager: not run: needs 4 GPUs, 0 are visible" in capsys.readouterr().out
    written = json.loads(output.read_text())
    assert written["not_run"] == {"gpt/hsdp_eager": "needs 4 GPUs, 0 are visible"}
    assert [result["case"] for result in written["results"]] == [GRAPHED]
    assert str(tmp_path) not in written["command"]


def test_running_nothing_is_a_failure(runner):
    assert runner("gpt/hsdp_eager") == 1
