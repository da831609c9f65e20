"""Test the layout of results files."""

import json

from benchmarks.results_file import write_json


def test_written_report_equals_the_given_one(tmp_path):
    path = tmp_path / "found.json"
    cases = [{"losses": [1.5, 2.0], "error": None}, {"losses": [], "name": 'a "b"'}]
    report = {"commit": "a1", "empty": [], "results": cases, "configurations": {"A": cases, "B": {"ms": {"x": 1}}}}
    write_json(path, report)
    assert json.loads(path.read_text()) == report
