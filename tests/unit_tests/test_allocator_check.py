"""Test which allocator settings are rejected with CUDA graphs."""

import pytest

from megatron.core.transformer._cuda_graphs.flags.table import allocator_problem

VARIABLES = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize(
    ("settings", "register", "refused"),
    [
        ("max_split_size_mb:64,expandable_segments:True", None, True),
        ("expandable_segments: True", "1", True),
        ("expandable_segments:True", "0", False),
        ("", None, False),
        ("max_split_size_mb:64,expandable_segments:False", None, False),
    ],
)
def test_expandable_segments_need_nccl_graph_register_0(monkeypatch, variable, settings, register, refused):
    for name in (*VARIABLES, "NCCL_GRAPH_REGISTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, settings)
    if register is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", register)
    start = f"{variable}=expandable_segments:True needs NCCL_GRAPH_REGISTER=0" if refused else ""
    problem = allocator_problem() or ""
    assert problem.startswith(start) and bool(problem) is refused
