"""Test the contents of the patch for ``git am``. ``make test-patch`` applies it and runs tests in the checkout."""

import ast
import shutil
import subprocess

import pytest

from megatron_fsdp_cuda_graphs import overlay
from tests.support.linked_core import installed
from tools import patch


@pytest.fixture(scope="module")
def files():
    return patch.patched_files(installed())


def test_patch_has_every_file_of_the_tree(files):
    tree = {file for file in overlay.ROOT.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    assert {overlay.ROOT / path.removeprefix("megatron/") for path in files} == tree


def test_extended_files_start_with_megatron_core_code(files):
    changed = {path: installed() / path for path in files if (installed() / path).is_file()}
    assert changed
    for path, file in changed.items():
        assert files[path].startswith(file.read_text() + patch.SEAM)


def test_patched_files_do_not_need_the_overlay(files):
    sources = [ast.parse(text) for path, text in files.items() if path.endswith(".py")]
    nodes = [node for tree in sources for node in ast.walk(tree)]
    assert not [node for node in nodes if isinstance(node, ast.ImportFrom) and "overlay" in (node.module or "")]
    calls = [node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert calls and "extend" not in calls


@pytest.mark.parametrize("version", ["MAJOR = 0\nMINOR = 20\nPATCH = 0\nPRE_RELEASE = ''\n", "", None])
def test_folder_without_a_tested_megatron_core_fails(tmp_path, capsys, version):
    info = tmp_path / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    if version is not None:
        info.write_text(version)
    assert patch.main([str(tmp_path)]) == 2
    assert "use one of 0.19.0" in (error := capsys.readouterr().err) or f"{tmp_path} has no megatron/core" in error


def test_git_applies_the_patch(tmp_path, files):
    for path in files:
        if (installed() / path).is_file():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(installed() / path, tmp_path / path)
    shutil.copy(installed() / "megatron/core/package_info.py", tmp_path / "megatron/core/package_info.py")
    written = patch.make_patch(tmp_path)
    subprocess.run(["git", "apply"], cwd=tmp_path, check=True, input=written)
    assert {path: (tmp_path / path).read_text() for path in files} == files
