"""Test demo.py and demo_report.py: comparison of two runs."""

import json
import math

import pytest

STEPS = 6
CAPTURED = 4  # first step with graphs


def metrics(path, graphs: int, changed: dict[int, dict] | None = None):
    """Write metrics like step_metrics.py, and return ``path``. ``changed`` maps a step to changed values."""
    lines = []
    for step in range(1, STEPS + 1):
        line: dict[str, float | None] = {"step": step, "loss": 5.0 / step, "grad_norm": 1.0 / step, "skipped": False}
        line |= {"ms": 10.0 * step if step > 1 else None, "graphs": graphs if step >= CAPTURED else 0}
        lines.append(json.dumps(line | (changed or {}).get(step, {})))
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.fixture
def runs(examples, tmp_path):
    """Return a factory of an eager run, and a graphed run with changed metrics."""
    from demo_report import Run

    def make(changed=None, graphs=8):
        eager = Run.read("eager", metrics(tmp_path / "eager.jsonl", 0))
        return eager, Run.read("graphed", metrics(tmp_path / "graphed.jsonl", graphs, changed))

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
def test_difference_of_one_bit_fails(runs, tmp_path, capsys, key):
    pytest.importorskip("matplotlib")
    value = (5.0 if key == "loss" else 1.0) / STEPS
    assert conclude(runs({STEPS: {key: math.nextafter(value, 0)}}), tmp_path) == 1
    assert f"differs in 1 steps, first in step {STEPS}" in capsys.readouterr().out


def test_run_without_graphs_fails(runs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert conclude(runs(graphs=0), tmp_path) == 1
    assert "graphed captured no graphs" in capsys.readouterr().out


def test_nan_fails_the_comparison(runs):
    from demo_report import failures

    eager, graphed = runs({2: {"loss": math.nan}})
    assert failures(graphed, graphed, STEPS)[0].startswith("loss or gradient norm differs in 1 steps, first in step 2")
    assert failures(eager, graphed, STEPS)
