"""cuda_graphs: the table of its names, docs/cuda_graphs_names.md, says what is so."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import megatron.core
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer._cuda_graphs import state
from megatron.core.transformer._cuda_graphs.local import buffers

TABLE = Path(__file__).parents[4] / "docs" / "cuda_graphs_names.md"
LIVE = {
    "_IS_GRAPH_CAPTURING": state,
    "_IS_GRAPH_WARMUP": state,
    "fwd_buffer_reuse_ref_count": buffers,
    "bwd_buffer_reuse_ref_count": buffers,
}


def table():
    """``[(where, name)]`` of the rows of the table."""
    rows = [line.split("|")[1:3] for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    return [(where.strip().strip("`"), name) for where, names in rows for name in re.findall(r"`(\w+)`", names)]


def names():
    return [name for _, name in table()]


@pytest.mark.parametrize(("file", "name"), table())
def test_names_are_defined_in_the_file_of_the_table(file, name):
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    assert name in vars(module)
    assert getattr(cuda_graphs, name) is getattr(module, name)
    if isinstance(vars(module)[name], (type, FunctionType)):  # it could have been imported there
        assert vars(module)[name].__module__ == module.__name__


def test_no_name_is_in_the_table_twice():
    assert sorted(names()) == sorted(set(names()))


def test_every_name_of_the_module_is_in_the_table():
    assert sorted([*cuda_graphs.__all__, *LIVE]) == sorted(names())


@pytest.mark.parametrize("name", LIVE)
def test_variables_have_their_value_of_the_moment(name, monkeypatch):
    monkeypatch.setattr(LIVE[name], name, 7)
    assert getattr(cuda_graphs, name) == 7


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'HAVE_TE_GRAPHS'"):
        _ = cuda_graphs.HAVE_TE_GRAPHS


IMPORTED_FIRST = [
    "megatron.core.transformer.cuda_graphs",
    "megatron.core.transformer._cuda_graphs.local.runner",
    "megatron.core.transformer.module",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel",
    "megatron.core.inference.contexts",
]


@pytest.mark.parametrize("first", IMPORTED_FIRST)
def test_nothing_comes_from_megatron_core_whatever_is_imported_first(first):
    code = f"""
import sys, torch, {first}
from megatron.core.transformer import cuda_graphs
assert not [name for name in sys.modules if name.endswith("_upstream_cuda_graphs")]
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def imported_by_megatron_core():
    """What the installed megatron-core imports from ``cuda_graphs``, with one file that does."""
    root = Path(megatron.core.__path__[0]).parent
    found: dict[str, Path] = {}
    for file in root.rglob("*.py"):
        text = file.read_text()
        if "cuda_graphs" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("transformer.cuda_graphs"):
                found |= {alias.name: file.relative_to(root) for alias in node.names}
    return found


def test_every_name_that_megatron_core_imports_is_in_the_table():
    imported = imported_by_megatron_core()
    assert "is_graph_capturing" in imported
    assert {name: file for name, file in imported.items() if name not in names()} == {}
