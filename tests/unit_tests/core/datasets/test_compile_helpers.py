"""Test that compile_helpers runs make only if the helper is missing."""

import subprocess
import sys

import pytest

pytest.importorskip("megatron.core")

from megatron.core.datasets import utils

HELPER = "megatron.core.datasets.helpers_cpp"


@pytest.fixture
def compilations(monkeypatch):
    """Replace ``subprocess.run`` with a stub; return the list to which it appends program names."""
    calls = []

    def run(command):
        calls.append(command[0])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_importable_helper_is_not_compiled(compilations, monkeypatch):
    monkeypatch.setitem(sys.modules, HELPER, object())
    utils.compile_helpers()
    assert compilations == []


def test_missing_helper_is_compiled(compilations, monkeypatch):
    monkeypatch.setitem(sys.modules, HELPER, None)  # makes the import fail
    utils.compile_helpers()
    assert compilations == ["make"]


def test_wheel_needs_no_makefile():
    utils.compile_helpers()  # megatron-core's function would exit here


def test_other_names_are_unchanged():
    assert [split.name for split in utils.Split] == ["train", "valid", "test"]
    assert utils.get_blend_from_list(["30", "a", "70", "b"]) == (["a", "b"], [30.0, 70.0])
