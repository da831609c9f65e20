"""Test the layout and metadata of results files."""

import json

import pytest
import torch

from benchmarks.results_file import command_line, write_json, write_results


def test_results_follow_command_hardware_and_versions(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    write_results(tmp_path / "found.json", command="python it.py", gpus=2, results=[1, 2])
    written = json.loads((tmp_path / "found.json").read_text())
    assert list(written) == ["command", "hardware", "versions", "results"]
    assert written["command"] == "python it.py"
    assert written["hardware"] == "2 x a GPU"
    assert written["results"] == [1, 2]


def test_each_case_is_one_line(tmp_path):
    path = tmp_path / "found.json"
    cases = [{"losses": [1.5, 2.0], "error": None}, {"losses": [], "name": 'a "b"'}]
    report = {"commit": "a1", "empty": [], "results": cases, "configurations": {"A": cases, "B": {"ms": {"x": 1}}}}
    write_json(path, report)
    assert json.loads(path.read_text()) == report
    lines = path.read_text().splitlines()
    assert lines[3:7] == [' "results": [', f"  {json.dumps(cases[0])},", f"  {json.dumps(cases[1])}", " ],"]
    assert lines[8:12] == ['  "A": [', f"   {json.dumps(cases[0])},", f"   {json.dumps(cases[1])}", "  ],"]
    assert lines[12] == '  "B": {"ms": {"x": 1}}'


def test_command_omits_output_paths():
    given = ["--output", "a b.json", "--gpus", "2", "--logs=somewhere", "--variants", "native::--seed 1"]
    assert command_line("it.py", given) == "python it.py --gpus 2 --variants 'native::--seed 1'"
