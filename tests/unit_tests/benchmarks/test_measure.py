"""One command measures all that documents quote: part by part, at one commit, from where it stopped."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import measure, step_time
from benchmarks.measure import PARTS, ROOT, Part

WRITES = "import json, sys; json.dump({'gpus': int(sys.argv[1]), 'numbers': [1]}, open(sys.argv[2], 'w'))"
WRITES += "; print('measured')"
CRASHES = f"{WRITES}; sys.exit(3)"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Measures ``programs``, by the names of parts, and returns the exit code and what was printed."""

    def run(programs, *given, commit="a1", arguments="GPUS FILE", **options):
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


def test_a_part_leaves_what_it_measured_at_which_commit_and_what_it_printed(run, tmp_path):
    code, _ = run({"times": WRITES})
    assert code == 0
    assert found(tmp_path, "times") == {"gpus": 2, "commit": "a1", "exit": 0}  # without what each step computed
    assert (tmp_path / "found" / "logs" / "times_2gpu.log").read_text() == "measured\n"


def test_a_part_is_told_how_many_launches_and_how_much_time_there_are(run, tmp_path):
    program = "import json, sys; json.dump({'words': [*map(int, sys.argv[1:3])]}, open(sys.argv[3], 'w'))"
    run({"times": program}, "--seconds", "400", "--launches", "3", arguments="LAUNCHES SECONDS FILE")
    launches, seconds = found(tmp_path, "times")["words"]
    assert launches == 3
    assert 390 <= seconds <= 400


def test_what_was_done_at_this_commit_is_not_done_again(run):
    run({"times": WRITES})
    code, text = run({"times": CRASHES, "memory": WRITES})
    assert code == 0
    assert "1 of 2: times: done before" in text
    assert "2 of 2: memory: done," in text


def test_another_commit_is_measured_anew(run, tmp_path):
    run({"times": WRITES})
    _, text = run({"times": WRITES}, commit="b2")
    assert "times: done," in text
    assert found(tmp_path, "times")["commit"] == "b2"


def test_a_part_that_fails_is_named_and_the_next_one_runs_and_it_is_done_again(run, tmp_path):
    code, text = run({"times": CRASHES, "memory": WRITES})
    assert code == 1
    assert "1 of 2: times: FAILED" in text
    assert "2 of 2: memory: done," in text
    assert found(tmp_path, "times")["exit"] == 3
    code, text = run({"times": WRITES, "memory": WRITES})
    assert code == 0
    assert "times: done," in text


def test_a_part_that_takes_too_long_fails_and_nothing_of_it_goes_on(run, tmp_path):
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


def test_none_is_begun_that_takes_longer_than_what_is_left(run, tmp_path):
    code, text = run({"times": WRITES}, "--seconds", "50", seconds=51)
    assert code == 0
    assert "times: not begun: takes about 51 s" in text
    assert not (tmp_path / "found" / "times_2gpu.json").exists()


def test_only_parts_that_are_asked_for_are_measured(run, tmp_path):
    run({"times": WRITES, "times_b": WRITES, "memory": WRITES}, "--only", "times", "mem*")
    assert {file.name for file in (tmp_path / "found").glob("*.json")} == {"times_2gpu.json", "memory_2gpu.json"}


def test_parts_run_beside_each_other_on_gpus_of_their_own(run, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    meets = f"""
import json, os, pathlib, sys, time
name, own = pathlib.Path(__file__).stem, os.environ["CUDA_VISIBLE_DEVICES"]
pathlib.Path(r"{tmp_path}", name + ".here").touch()
until = time.monotonic() + 30
while len([*pathlib.Path(r"{tmp_path}").glob("*.here")]) < 2 and time.monotonic() < until:
    time.sleep(0.01)
json.dump({{"own": own, "met": time.monotonic() < until}}, open(sys.argv[2], "w"))
"""
    code, _ = run({"times": meets, "memory": meets}, "--at-once", "2")
    both = [found(tmp_path, name) for name in ("times", "memory")]
    assert code == 0
    assert all(each["met"] and each["at_once"] == 2 for each in both)
    assert {each["own"] for each in both} == {"0,1", "2,3"}


@pytest.mark.parametrize("many", ["0", "3"])
def test_more_parts_at_once_than_there_are_gpus_for_are_refused(run, monkeypatch, many):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(SystemExit, match=f"--at-once: {many} parts for 2 GPUs"):
        run({"times": WRITES}, "--at-once", many)


def test_what_runs_ends_with_the_measurement(run, tmp_path):
    waits = f"""
import os, pathlib, signal, time
if os.fork() == 0:
    time.sleep(1)
    os.kill({os.getpid()}, signal.SIGALRM)
    os._exit(0)
pathlib.Path(r"{tmp_path}/pid").write_text(str(os.getpid()))
time.sleep(600)
"""

    def stop(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            run({"times": waits, "memory": WRITES})
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()
    assert not (tmp_path / "found" / "memory_2gpu.json").exists()


def test_parts_are_listed_with_their_commits(run):
    run({"times": WRITES})
    _, text = run({"times": WRITES, "memory": WRITES}, "--list")
    assert text.splitlines() == [
        "times, 2 GPUs, about 300 s: a1",
        "memory, 2 GPUs, about 300 s: not measured",
    ]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a file of the product and results of its first commit; ``commit`` changes a file of it."""

    def git(*arguments):
        given = ["git", "-C", str(tmp_path), "-c", "user.name=test", "-c", "user.email=test@localhost", *arguments]
        return subprocess.run(given, check=True, capture_output=True, text=True).stdout.strip()

    def commit(name, text):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        git("add", name)
        git("commit", "-qm", "change")
        return git("rev-parse", "--short=10", "HEAD")

    git("init", "-q")
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    return commit


def test_results_are_stale_once_their_code_has_changed(repository, tmp_path):
    first = repository("megatron/core/engine.py", "1")
    named, unnamed = tmp_path / "results/named_2gpu.json", tmp_path / "results/unnamed_2gpu.json"
    repository("results/named_2gpu.json", json.dumps({"commit": f"{first} or before"}))
    second = repository("results/unnamed_2gpu.json", "{}")
    repository("docs/page.md", "1")
    assert list(measure.stale([named, unnamed])) == []
    repository("megatron/core/engine.py", "2")
    assert list(measure.stale([named, unnamed])) == [(named, first, 1), (unnamed, second[:7], 1)]


def test_a_commit_is_marked_where_files_of_the_product_differ_from_it(repository, tmp_path):
    first = repository("megatron/core/engine.py", "1")
    assert measure.current_commit() == first
    (tmp_path / "megatron/core/engine.py").write_text("2")
    assert measure.current_commit() == f"{first}+"


def test_without_a_repository_the_commit_must_be_named(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="--commit"):
        measure.current_commit()


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.name} {part.gpus}")
def test_every_part_runs_a_file_of_this_repository_that_writes_what_it_finds(part):
    words = part.arguments.split()
    script = next((word for word in words if word.endswith(".py")), None)
    file = ROOT / (script or words[1].replace(".", "/") + ".py")
    option = words[words.index("FILE") - 1]
    assert f'"{option}"' in file.read_text()
    assert part.seconds < measure.LONGEST


@pytest.mark.parametrize(
    "part", [part for part in PARTS if "step_time.py" in part.arguments], ids=lambda part: part.name
)
def test_step_time_knows_the_models_and_variants_of_its_parts(part):
    words = {"GPUS": str(part.gpus[0]), "LAUNCHES": "2"}
    given = [words.get(word, word) for word in shlex.split(part.arguments)][1:]
    benchmark = step_time.Benchmark(step_time.parse(given), on_cpu=False)
    assert benchmark.ranks == part.gpus[0]
    assert all(variants for variants in benchmark.variants.values())


def test_no_two_parts_have_one_file():
    files = [part.file(ROOT, gpus) for part in PARTS for gpus in part.gpus]
    assert len(files) == len(set(files))
