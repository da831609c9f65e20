"""A file of tests/gpu is run, and its results are kept; pytest is not run here."""

import os
import sys
from pathlib import Path

import pytest

from tests.support import on_gpus


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs ``test_it`` with that exit code of pytest; ``text`` is what the tests write, None for nothing."""
    monkeypatch.setenv("EQUALITY_RESULTS", "before")

    def run(code, text):
        def tests(arguments):
            assert Path(arguments[-1]) == on_gpus.TESTS / "test_it.py"
            if text is not None:
                (Path(os.environ["EQUALITY_RESULTS"]) / "test_it.json").write_text(text)
            return code

        monkeypatch.setattr(pytest, "main", tests)
        monkeypatch.setattr(sys, "argv", ["on_gpus", "test_it", "--output", str(tmp_path / "found.json")])
        return on_gpus.main()

    return run


@pytest.mark.parametrize("code", [0, 1])
def test_results_are_kept_and_the_exit_code_is_that_of_the_tests(run, tmp_path, code):
    assert run(code, "{}") == code
    assert (tmp_path / "found.json").read_text() == "{}"


@pytest.mark.parametrize(("code", "expected"), [(0, 1), (5, 5)])
def test_tests_that_wrote_nothing_are_no_success(run, tmp_path, code, expected):
    assert run(code, None) == expected
    assert not (tmp_path / "found.json").exists()
