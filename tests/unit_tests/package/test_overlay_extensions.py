"""What this tree's files replace in the modules of megatron-core that they extend."""

import ast
import importlib
import os

import pytest

pytest.importorskip("megatron.core")

from megatron_fsdp_cuda_graphs import overlay

EXTENDED = [name for name in overlay.patched_modules() if overlay.change(name) == "extended"]
# Names of megatron-core's that files of this tree replace by importing others.
IMPORTED = {"RegisterFSDPBackwardFunction", "TrainingState"}


def test_the_version_that_was_asked_for_is_tested():
    asked = os.environ.get("CORE_VERSION")
    core = overlay.find_core()
    assert core is not None and core.version in ((asked,) if asked else overlay.TESTED_VERSIONS)


def test_one_module_is_replaced():
    assert [name for name in overlay.patched_modules() if overlay.change(name) == "replaced"] == [
        "megatron.core.transformer.cuda_graphs"
    ]


@pytest.mark.parametrize("name", EXTENDED)
def test_names_are_replaced_by_definitions_and_not_by_an_import(name):
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
