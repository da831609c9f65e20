"""Test measure.py: parts run sequentially at one commit, and later calls resume."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import measure
from benchmarks.measure import Part

WRITES = "import json, sys; json.dump({'gpus': int(sys.argv[1]), 'numbers': [1]}, open(sys.argv[2], 'w'))"
WRITES += "; print('measured')"
CRASHES = f"{WRITES}; sys.exit(3)"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    def run(programs, *given, commit="a1", arguments="GPUS FILE", **options):
        """Run measure.py on parts with the given names and source code; return the exit code and the output."""
        parts = []
        for name, program in programs.items():
            (tmp_path / f"{name}.py").write_text(program)
            parts.append(Part(name, (2,), f"{tmp_path / name}.py {arguments}", **options))
        monkeypatch.setattr(measure, "PARTS", parts)
        line = ["measure.py", "--folder", str(tmp_path / "found"), "--gpus", "2", "--commit", commit, *given]
        monkeypatch.setattr(sys, "argv", line)
        return measure.main(), capsys.readouterr().out

    return run


def found(tmp_path, name):
    return json.loads((tmp_path / "found" / f"{name}_2gpu.json").read_text())


def test_results_name_the_commit_and_logs_are_kept(run, tmp_path):
    code, _ = run({"times": WRITES})
    assert code == 0
    assert found(tmp_path, "times") == {"gpus": 2, "commit": "a1", "exit": 0}
    assert (tmp_path / "found" / "logs" / "times_2gpu.log").read_text() == "measured\n"


def test_parts_failed_or_of_another_commit_run_again(run, tmp_path):
    code, text = run({"times": CRASHES, "memory": WRITES})
    assert code == 1
    assert "1 of 2: times: FAILED" in text
    assert "2 of 2: memory: done," in text
    assert found(tmp_path, "times")["exit"] == 3
    code, text = run({"times": WRITES, "memory": WRITES})
    assert code == 0
    assert "times: done," in text
    assert "memory: already measured" in text
    _, text = run({"memory": WRITES}, commit="b2")
    assert "memory: done," in text
    assert found(tmp_path, "memory")["commit"] == "b2"


def test_timeout_ends_all_processes_of_a_part(run, tmp_path):
    child = "import subprocess, sys; "
    child += (
        f"print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid, file=open(r'{tmp_path}/pid', 'w'))"
    )
    code, text = run({"times": f"{child}; {WRITES}; import time; time.sleep(600)"}, "--seconds", "2", seconds=1)
    assert code == 1
    assert "times: FAILED" in text
    assert found(tmp_path, "times")["exit"] == 124
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/status")
    assert not status.exists() or "zombie" in status.read_text()
