"""Trainings of cases and their launches."""

import pytest

from tests.functional_tests._runner import trainings
from tests.functional_tests._runner.case import MEASURED


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train cases with a plan that gives each run the losses of its steps; return what was found, the launches, and the
    order in which cases ended."""
    launches = []

    def run_plan(runs, *, show, **how):
        launches.append((runs, how))
        done = 0
        for run in runs:
            if "--fails" in run.flags:
                show(run, {"error": "rank 1: no"})
                continue
            first = done + 1 if run.variant == "second half" else 1
            done = run.steps
            numbers = [[float(step).hex(), float(-step).hex()] for step in range(first, run.steps + 1)]
            measured = dict.fromkeys((*MEASURED, "seconds"), run.steps)
            show(run, {"numbers": numbers, "evaluations": [], "graphs": run.number, **measured})

    monkeypatch.setattr(trainings, "run_plan", run_plan)

    def run(*cases):
        ended = []

        def note(case, found_so_far):
            ended.append(case.name)
            found.update(found_so_far)

        found: dict[str, trainings.Found] = {}
        trainings.train(cases, names=MEASURED, logs=tmp_path, stall_seconds=9.0, ended=note)
        return found, launches, ended

    return run


def test_regular_case_is_one_training(train, make_case, capsys):
    found, [(runs, how)], ended = train(make_case())
    (run,) = runs
    assert run.flags == ["--train-iters", "3", "--cuda-graph-impl", "transformer_engine"]
    assert run.side_stream
    assert found["gpt/graphed"].losses == [float(step).hex() for step in (1, 2, 3)]
    assert found["gpt/graphed"].norms[0] == (-1.0).hex()
    assert found["gpt/graphed"].measured == dict.fromkeys(MEASURED, 3)
    assert how["ranks"] == 2
    assert ended == ["gpt/graphed"]
    assert capsys.readouterr().out == "gpt/graphed (training): 3 s\n"


def test_resumed_case_has_the_steps_of_two_trainings(train, make_case):
    case = make_case(resumes=True, arguments={"--train-iters": 8})
    found, [(runs, _)], ended = train(case)
    first, second = runs
    assert ended == [case.name]
    checkpoint = first.flags[first.flags.index("--save") + 1]
    assert first.flags[-4:] == ["--save-interval", "4", "--exit-interval", "4"]
    assert second.flags[-2:] == ["--load", checkpoint]
    assert (first.steps, second.steps) == (4, 8)
    assert found[case.name].losses == [float(step).hex() for step in range(1, 9)]
    assert found[case.name].measured["ms"] == 8


def test_cases_of_one_layout_share_a_launch(train, make_case):
    flags = {"--train-iters": 3}
    cases = [
        make_case("a", arguments=flags),
        make_case("b", arguments=flags | {"--tensor-model-parallel-size": 2}),
        make_case("c", arguments=flags | {"--bf16": True}),
        make_case("d", arguments=flags | {"--num-distributed-optimizer-instances": 2}),
        make_case("e", arguments=flags, environment={"A": "1"}),
        make_case("f", arguments=flags, ranks=4),
        make_case("g", arguments=flags, on_cpu=True),
    ]
    _, launches, _ = train(*cases)
    assert [[run.configuration for run in runs] for runs, _ in launches] == [
        ["a", "c"],
        ["b"],
        ["d"],
        ["e"],
        ["f"],
        ["g"],
    ]
    assert [how["environment"].get("CUDA_VISIBLE_DEVICES") for _, how in launches] == [None] * 5 + [""]
    assert launches[3][1]["environment"]["A"] == "1"
    assert [run.number for run in launches[0][0]] == [0, 1]
