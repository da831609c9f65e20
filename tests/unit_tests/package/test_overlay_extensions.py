"""Test which names of megatron-core the patch replaces."""

import ast
import importlib
import os
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from megatron_fsdp_cuda_graphs import overlay

FILES = {name: overlay.tree_file(name) for name in overlay.patched_modules()}
EXTENDED = [name for name, file in FILES.items() if file and overlay.is_extension(file)]
# Names of megatron-core that files of this tree replace with an import: one, and the public names of ``cuda_graphs``.
IMPORTED = {"TrainingState", *importlib.import_module("megatron.core.transformer.cuda_graphs").__all__}


def test_requested_version_of_megatron_core_is_installed():
    asked = os.environ.get("CORE_VERSION")
    core = overlay.find_core()
    assert core is not None and core.version in ((asked,) if asked else overlay.TESTED_VERSIONS)


def test_no_module_is_replaced():
    core = overlay.find_core()
    assert core is not None
    site = Path(core.origin).parents[2]
    there = [name for name in FILES if overlay.module_file(site.joinpath(*name.split(".")))]
    assert {*there} == {*EXTENDED}


@pytest.mark.parametrize("name", EXTENDED)
def test_names_are_replaced_by_definitions_only(name):
    module = importlib.import_module(name)
    replaced = {key for key, value in vars(overlay.upstream(name)).items() if vars(module)[key] is not value}
    file = overlay.tree_file(name)
    assert file is not None
    body = ast.parse(file.read_text()).body
    imports = [node for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    assert not replaced & imported - IMPORTED
    assert module.__file__ != str(file)
    assert overlay.is_patched(module)
