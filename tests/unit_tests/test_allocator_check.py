"""Test which allocator settings are rejected with CUDA graphs."""

import pytest

from megatron.core.transformer._cuda_graphs.flags.table import allocator_problem

VARIABLES = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]
EXPANDABLE = "max_split_size_mb:64,expandable_segments:True"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for variable in (*VARIABLES, "NCCL_GRAPH_REGISTER"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("register", [None, "1"])
def test_expandable_segments_need_nccl_graph_register_0(monkeypatch, variable, register):
    monkeypatch.setenv(variable, EXPANDABLE)
    if register:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", register)
    assert (allocator_problem() or "").startswith(f"{variable}=expandable_segments:True needs NCCL_GRAPH_REGISTER=0")


def test_spaces_are_ignored(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments: True")
    assert allocator_problem()


@pytest.mark.parametrize("variable", VARIABLES)
def test_nccl_graph_register_0_allows_them(monkeypatch, variable):
    monkeypatch.setenv(variable, EXPANDABLE)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert allocator_problem() is None


@pytest.mark.parametrize("settings", ["", "expandable_segments:False", "max_split_size_mb:64"])
def test_other_settings_are_allowed(monkeypatch, settings):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    assert allocator_problem() is None
