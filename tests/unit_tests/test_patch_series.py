"""The patch as patches; `make test-patch` applies them and runs the unit tests there."""

import ast
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fsdp_cuda_graphs import overlay
from tests.support.patch_tests import TESTS
from tools.patch_series import __main__ as cli
from tools.patch_series import contents
from tools.patch_series.series import SERIES

CORE = overlay.find_core()
assert CORE is not None
INSTALLED = Path(CORE.origin).parents[2]


@pytest.fixture(scope="module")
def patches():
    return list(contents.patches(INSTALLED))


@pytest.fixture(scope="module")
def files(patches):
    """The files that all patches change or add: as the last leaves each, and as it was before the first."""
    changed: dict[str, contents.File] = {}
    for _, each in patches:
        for file in each:
            changed[file.path] = replace(file, before=changed.get(file.path, file).before)
    return list(changed.values())


@pytest.fixture
def checkout(tmp_path, files):
    """A git repository of the files that the patch changes, and of the version."""
    folder = tmp_path / "checkout"
    changed = [file.path for file in files if file.before is not None]
    for path in [*changed, "megatron/core/package_info.py"]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(INSTALLED / path, folder / path)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "megatron-core")
    return folder


def git(folder, *arguments):
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_commands_of_the_readme_write_patches_and_git_takes_them(checkout, files, tmp_path, monkeypatch):
    checkout = checkout.rename(tmp_path / "MEGATRON_LM_CHECKOUT")
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "test")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "test@localhost")
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    make, apply = re.findall(r"^    (.*PATCHES.*)$", readme, re.MULTILINE)
    printed = shell(make.replace("python", sys.executable, 1), tmp_path)
    written = sorted((tmp_path / "PATCHES").glob("*/*.patch"))
    assert [tmp_path / line for line in printed[: len(SERIES)]] == written
    assert [patch.parent.name for patch in written] == [patch.folder for patch in SERIES]
    for patch in written:
        if patch.parent.name == SERIES[0].folder:
            git(checkout, "apply", "--check", str(patch))  # alone
    shell(apply, tmp_path)
    assert len(git(checkout, "log", "--oneline").splitlines()) == 1 + len(SERIES)
    for file in files:
        assert (checkout / file.path).read_text() == file.text
    assert git(checkout, "status", "--porcelain") == ""


def shell(command, folder):
    """The lines that a command prints."""
    done = subprocess.run(command, shell=True, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def test_faults_of_megatron_core_are_mended_before_anything_is_captured(patches):
    mended = [changed for patch, changed in patches if patch.folder == SERIES[0].folder]
    assert len(mended) > 5
    assert not any("_cuda_graphs" in file.path or "_cuda_graphs" in file.text for files in mended for file in files)


def test_every_patch_has_tests_that_are_there(patches):
    for patch, changed in patches:
        assert changed
        tests, _ = TESTS[patch.title]
        assert tests
        assert all((Path(__file__).parent / path).exists() for path in tests), patch.title


def test_a_patch_imports_only_what_is_there(patches):
    """Of patches that mend faults, alone, what they bring themselves."""
    added = {file.path for _, changed in patches for file in changed if file.before is None}
    there = set()
    for patch, changed in patches:
        own = {file.path for file in changed}
        there |= own
        for file in changed:
            package = file.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".").rpartition(".")[0]
            new = {*contents.imports(file.text, package)} - {*contents.imports(file.before or "", package)}
            for module, name in new:
                needed = {f"{each.replace('.', '/')}.py" for each in (module, f"{module}.{name}")}
                assert needed & added <= (own if patch.changes else there), (patch.title, file.path)


def test_every_file_of_the_patch_is_in_the_series_and_needs_nothing_else_of_this_project(files):
    files = {file.path: file for file in files}
    assert len(files) == len(overlay.patched_modules())
    assert [path for path, file in files.items() if "import megatron_fsdp_cuda_graphs" in file.text] == []
    changed = {path for path, file in files.items() if file.before is not None}
    assert {path[:-3].replace("/", ".") for path in changed} == {
        name for name in overlay.patched_modules() if overlay.change(name) != "added"
    }


def test_nothing_of_the_overlay_is_left(files):
    for file in files:
        assert not re.search(r"\b_upstream\b|extend\(__name__\)", file.text), file.path


def test_no_definition_is_dead_above_another(files):
    for file in files:
        bodies = (node.body for node in ast.walk(ast.parse(file.text)) if isinstance(node, ast.Module | ast.ClassDef))
        for body in bodies:
            names = [node.name for node in body if isinstance(node, ast.FunctionDef) and not node.decorator_list]
            assert len({*names}) == len(names), (file.path, sorted(names))


def test_no_name_is_undefined_and_no_import_of_ours_unused(files, tmp_path):
    changed = {file.path: file for file in files if file.before is not None}
    before = messages({path: file.before for path, file in changed.items()}, tmp_path / "before")
    found = messages({path: file.text for path, file in changed.items()}, tmp_path / "after") - before
    imported = re.compile(r"`(?:.*\.)?(\w+)` imported but unused")  # megatron-core's may be unused now
    theirs = {each for each in found if (name := imported.match(each[1])) and name[1] in changed[each[0]].before}
    assert found - theirs == set()


def messages(texts, folder):
    """What ruff says of these files: path and message."""
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    command = (sys.executable, "-m", "ruff", "check", "--isolated", "--output-format", "json", "--select", "F401,F821")
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    return {(str(Path(each["filename"]).relative_to(folder)), each["message"]) for each in json.loads(done.stdout)}


@pytest.mark.parametrize("change", [("MINOR = ", "MINOR = 1"), ('PRE_RELEASE = ""', 'PRE_RELEASE = "rc0"')], ids=str)
def test_another_version_is_refused(checkout, tmp_path, capsys, change):
    info = checkout / "megatron/core/package_info.py"
    info.write_text(info.read_text().replace(*change))
    assert cli.main([str(checkout), str(tmp_path / "patches")]) == 2
    assert "the patch was tested with" in capsys.readouterr().err


def test_a_folder_that_is_no_checkout_or_not_empty_is_named(checkout, tmp_path, capsys):
    assert cli.main([str(tmp_path), str(tmp_path / "patches")]) == 2
    assert f"{tmp_path} has no megatron/core" in capsys.readouterr().err
    assert cli.main([str(checkout), str(checkout)]) == 2
    assert f"{checkout} is not empty" in capsys.readouterr().err
