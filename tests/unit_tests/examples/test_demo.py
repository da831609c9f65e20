"""examples/demo.py and demo_report.py: the comparison of two runs, which must fail if they differ."""

import json
import math
import subprocess
import sys

import pytest

STEPS = 6
CAPTURED = 4  # first step with graphs


def metrics(path, graphs: int, changed: dict[int, dict] | None = None, steps: int = STEPS):
    """Write a run's metrics as step_metrics.py does; ``changed`` replaces keys of a step."""
    lines = []
    for step in range(1, steps + 1):
        line: dict[str, float | None] = {"step": step, "loss": 5.0 / step, "grad_norm": 1.0 / step, "skipped": False}
        line |= {"ms": 10.0 * step if step > 1 else None, "graphs": graphs if step >= CAPTURED else 0}
        lines.append(json.dumps(line | (changed or {}).get(step, {})))
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.fixture
def runs(examples, tmp_path):
    """Makes an eager run and a graphed one that differs from it in ``changed``."""
    from demo_report import Run

    def make(changed=None, graphs=8, steps=STEPS):
        eager = Run.read("eager", metrics(tmp_path / "eager.jsonl", 0))
        return eager, Run.read("graphed", metrics(tmp_path / "graphed.jsonl", graphs, changed, steps))

    return make


def conclude(runs, tmp_path) -> int:
    import demo

    return demo.conclude(*runs, STEPS, tmp_path / "demo.png", "title")


def test_equal_runs_pass_and_are_plotted(runs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert conclude(runs(), tmp_path) == 0
    assert "PASSED" in capsys.readouterr().out
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_one_bit_in_one_step_fails(runs, tmp_path, capsys, key):
    pytest.importorskip("matplotlib")
    value = (5.0 if key == "loss" else 1.0) / STEPS
    assert conclude(runs({STEPS: {key: math.nextafter(value, 0)}}), tmp_path) == 1
    assert f"differs in 1 steps, first in step {STEPS}" in capsys.readouterr().out


def test_a_run_without_graphs_fails(runs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert conclude(runs(graphs=0), tmp_path) == 1
    assert "graphed made no graphs" in capsys.readouterr().out


def test_a_run_that_is_too_short_fails(runs):
    from demo_report import failures

    assert failures(*runs(steps=STEPS - 1), STEPS) == [f"graphed has {STEPS - 1} steps, not {STEPS}"]


def test_nan_equals_nothing(runs):
    from demo_report import failures

    eager, graphed = runs({2: {"loss": math.nan}})
    assert failures(graphed, graphed, STEPS)[0].startswith("loss or gradient norm differs in 1 steps, first in step 2")
    assert failures(eager, graphed, STEPS)


def test_an_eager_run_with_graphs_proves_nothing(runs):
    from demo_report import failures

    _, graphed = runs()
    assert failures(graphed, graphed, STEPS) == ["graphed made 8 graphs"]


def test_the_table_marks_the_step_that_differs(runs):
    from demo_report import table

    lines = table(*runs({3: {"loss": 1.5}})).splitlines()
    marked = [line.split()[0] for line in lines if " NO" in line]
    assert marked == ["3"]
    assert "bit-equal steps        5 of 6" in lines


def test_the_table_tells_where_graphs_begin(runs):
    from demo_report import table

    captured = [line.split()[0] for line in table(*runs()).splitlines() if "graphs captured" in line]
    assert captured == [str(CAPTURED)]


def test_the_median_is_that_of_the_second_half(runs):
    assert runs()[0].median_ms() == 50.0


def test_a_line_that_is_still_being_written_is_not_read(examples, tmp_path):
    from demo_report import read_steps

    file = metrics(tmp_path / "run.jsonl", 0)
    file.write_text(file.read_text() + '{"step": 7, "lo')
    assert [step.step for step in read_steps(file)] == list(range(1, STEPS + 1))


def test_a_training_that_fails_ends_the_demo_with_its_log(examples, tmp_path, monkeypatch):
    import demo

    program = "import sys; print('[rank0]: the reason'); print('noise'); sys.exit(3)"
    monkeypatch.setattr(
        demo.subprocess,
        "Popen",
        lambda command, original=subprocess.Popen, **options: original([sys.executable, "-c", program], **options),
    )
    setup = demo.Setup("nowhere", 1, (), "", STEPS)
    with pytest.raises(SystemExit, match=r"\[rank0\]: the reason\nTraining eager failed: exit code 3"):
        demo.train(setup, "eager", demo.EAGER, STEPS, tmp_path / "data", tmp_path)


def test_a_training_that_stands_still_ends_the_demo(examples, tmp_path, monkeypatch):
    import demo

    monkeypatch.setattr(demo, "STALL_SECONDS", 0.3)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert demo.follow(process, tmp_path / "none.jsonl", print) == "no new step in 0.3 seconds"
    finally:
        process.kill()
        process.wait()


def test_too_few_steps_are_refused(examples, tmp_path, capsys):
    import demo

    with pytest.raises(SystemExit):
        demo.main(["--steps", "3", "--device", "cpu", "--output", str(tmp_path)])
    assert "--steps: graphs come after 3 steps" in capsys.readouterr().err
