"""Test which names of megatron-core the patch replaces."""

import ast
import importlib
import os
import subprocess
import sys
from textwrap import dedent

import pytest

pytest.importorskip("megatron.core")

from megatron_fsdp_cuda_graphs import overlay
from tests.support.linked_core import installed

NAMES = overlay.patched_modules()
EXTENDED = [name for name in NAMES if overlay.module_file(installed().joinpath(*name.split(".")))]
# Names of megatron-core that files of this tree replace with an import: one, and the public names of ``cuda_graphs``.
IMPORTED = {"TrainingState", *importlib.import_module("megatron.core.transformer.cuda_graphs").__all__}


def test_requested_version_of_megatron_core_is_installed():
    asked = os.environ.get("CORE_VERSION")
    core = overlay.find_core()
    assert core is not None and core.version in ((asked,) if asked else overlay.TESTED_VERSIONS)


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


def test_no_module_holds_a_replaced_definition():
    """Check circular imports: a module may read a name before this project's file replaces it."""
    code = """
        import importlib, os, sys
        import megatron.core  # first, as every import of a module in it does
        from megatron_fsdp_cuda_graphs import overlay

        for first in sys.argv[1:]:
            if first in sys.modules:
                continue
            if os.fork():
                assert os.wait()[1] == 0, first
                continue
            importlib.import_module(first)
            modules = {name: module for name, module in sys.modules.items() if name.startswith("megatron.")}
            replaced = {
                id(value): name
                for name in modules.keys() & sys.argv
                for key, value in vars(overlay.upstream(name)).items()
                if vars(modules[name])[key] is not value and getattr(value, "__module__", "") == name
            }
            for name, module in modules.items():
                for key, value in vars(module).items():
                    if replaced.get(id(value), name) != name:
                        print(f"{name}.{key}: define it above the import that leads from {value.__module__} to {name}")
            sys.stdout.flush()
            os._exit(0)
    """
    command = [sys.executable, "-W", "ignore", "-c", dedent(code), *EXTENDED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
