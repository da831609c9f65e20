"""inject_all_faults: sums of what pairs found, and what is left of pairs that die or stand still."""

import json
import math
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests.support import inject_all_faults

# In the place of a pair: the first finds something, the second dies, the third stands still, others find the same.
PAIR = """
import json, os, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
first = int(options["--first"])
if first == 1:
    sys.exit("last words")
case = {"case": "a model", "ranks": 2, "places": {"memory": 7}, "places_left_out": {"memory": 1}, "unreached": 0}
case |= {"attempts": {"memory, one rank": 2}, "passed": {"memory, one rank": 2}, "steps_compared": 3}
case |= {"slowest_seconds": first / 10, "problems": []}
with open(options["--output"] + ".new", "w") as file:
    file.write(json.dumps({"results": [case]}))
os.rename(file.name, options["--output"])
if first == 2:
    time.sleep(600)
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A function that runs so many pairs and returns the exit status and the sums.

    The time is up as soon as all pairs have ended, but for one that stands still.
    """
    launch, running = subprocess.Popen, []

    def start(command, **files):
        running.append(launch([sys.executable, "-S", "-c", PAIR, *command[command.index("--output") :]], **files))
        return running[-1]

    def now():
        ended = [process.poll() is not None for process in running]
        return math.inf if ended == [True, True, False, True] and (tmp_path / "sums.pairs/2.json").exists() else 0.0

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(inject_all_faults, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    monkeypatch.setattr(inject_all_faults, "WRITE_EVERY", 0.1)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name, value in inject_all_faults.ON_CPU.items():
        monkeypatch.setenv(name, value)

    def run(pairs):
        output = tmp_path / "sums.json"
        options = ["--pairs", str(pairs), "--seconds", "1", "--output", str(output)]
        monkeypatch.setattr(sys, "argv", ["inject_all_faults.py", *options])
        return inject_all_faults.main(), json.loads(output.read_text())

    return run


def test_what_the_pairs_found_is_added_up_and_nothing_else_is_kept(run, tmp_path, capsys):
    status, found = run(1)
    assert (status, found["pairs_that_died"], found["pairs_still_running"]) == (0, 0, 0)
    (case,) = found["results"]
    assert (case["places"], case["places_left_out"], case["steps_compared"]) == ({"memory": 7}, {"memory": 1}, 3)
    assert "2 of 2 attempts passed, 1 places left out" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["sums.json"]


def test_logs_of_pairs_that_die_or_stand_still_are_kept_and_the_others_count(run, tmp_path, capsys):
    status, found = run(4)
    assert (status, found["pairs"], found["pairs_that_died"], found["pairs_still_running"]) == (1, 4, 2, 0)
    (case,) = found["results"]
    assert case["attempts"] == case["passed"] == {"memory, one rank": 6}
    assert (case["places_left_out"], case["slowest_seconds"]) == ({"memory": 3}, 0.3)
    assert capsys.readouterr().out.endswith("1.log:\nlast words\n")
    kept = {path.name for path in (tmp_path / "sums.pairs").iterdir()}
    assert kept == {"1.log", "2.log", "2.json"}
