"""cuda_graphs: the table of its names, docs/cuda_graphs_names.md, says what is so."""

import ast
import re
import sys
from pathlib import Path

import pytest

import megatron.core
from megatron.core.transformer import cuda_graphs
from megatron_fsdp_cuda_graphs import overlay

TABLE = Path(__file__).parents[4] / "docs" / "cuda_graphs_names.md"
UPSTREAM = overlay.upstream(cuda_graphs.__name__)


def table():
    """``[(where, name)]`` of the rows of the table."""
    rows = [line.split("|")[1:3] for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    return [(where.strip().strip("`"), name) for where, names in rows for name in re.findall(r"`(\w+)`", names)]


def names(start):
    return [name for where, name in table() if where.startswith(start)]


@pytest.mark.parametrize(("file", "name"), [row for row in table() if row[0].endswith(".py")])
def test_our_names_are_defined_in_the_file_of_the_table(file, name):
    defined = vars(cuda_graphs)[name]
    source = Path(sys.modules[defined.__module__].__file__ or "")
    assert source.relative_to(overlay.ROOT) == Path(file).relative_to("megatron")


@pytest.mark.parametrize("name", names("megatron-core"))
def test_the_names_of_megatron_core_are_its_own(name):
    assert name not in vars(cuda_graphs)
    assert getattr(cuda_graphs, name) is getattr(UPSTREAM, name)


@pytest.mark.parametrize("name", names("nowhere"))
def test_names_that_are_nowhere_cannot_be_imported(name):
    assert not hasattr(cuda_graphs, name)


def test_no_name_is_in_the_table_twice():
    listed = [name for _, name in table()]
    assert sorted(listed) == sorted(set(listed))


def test_every_name_of_ours_is_in_the_table():
    assert sorted(cuda_graphs.__all__) == sorted(names("megatron/"))


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
    assert {name: file for name, file in imported.items() if name not in names("megatron")} == {}
