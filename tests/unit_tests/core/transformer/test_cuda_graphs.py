"""Test that all names of ``cuda_graphs`` exist, and that patching them affects the functions that use them."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

import megatron.core
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer._cuda_graphs import agreement
from megatron.core.transformer._cuda_graphs.te import capture_arguments, capture_report, capture_state
from tests.support.sample import asked, mostly_long


def imported_by_megatron_core():
    """Return the names that megatron-core imports from ``cuda_graphs``, each with one importing file."""
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


def test_names_imported_by_megatron_core_exist():
    imported = imported_by_megatron_core()
    assert "is_graph_capturing" in imported
    assert {name: file for name, file in imported.items() if not hasattr(cuda_graphs, name)} == {}


IMPORTED_FIRST = [
    "megatron.core.transformer.cuda_graphs",
    "megatron.core.transformer.module",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel",
    "megatron.core.tensor_parallel.gtp_api",
    "megatron.core.inference.contexts",
]


@pytest.fixture(scope="module")
def imported(request):
    """Map each module to the modules that are loaded when a new process imports it first."""
    code = """
import importlib, json, os, sys
import torch._inductor.compile_fx, torch.distributed.checkpoint, torch.distributed.tensor  # once for all processes
for first in sys.argv[1:]:
    if os.fork() == 0:
        importlib.import_module(first)
        from megatron.core.transformer import cuda_graphs
        assert all(hasattr(cuda_graphs, name) for name in cuda_graphs.__all__)
        print(json.dumps([first, sorted(sys.modules)]), flush=True)
        os._exit(0)
    os.wait()
"""
    first = [name for (name,) in asked(request, "first")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *first], capture_output=True, text=True, check=True
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert {*found} == {*first}, done.stderr[-6000:]
    return found


@pytest.mark.parametrize("first", mostly_long(IMPORTED_FIRST, IMPORTED_FIRST[0]))
def test_patch_is_used_whatever_is_imported_first(imported, first):
    assert "megatron.core.transformer.cuda_graphs" in imported[first]


# Every name in megatron-core's API documentation of the module: functions and data, then classes and their members.
DOCUMENTED = {
    "": """
        _IS_GRAPH_CAPTURING _IS_GRAPH_WARMUP logger FREEZE_GC is_graph_capturing _set_capture_start _set_capture_end
        is_graph_warmup _set_warmup_start _set_warmup_end tree_map _check_supported_type
        _determine_if_first_last_layer_of_this_vp_chunk _clone_nested_tensors _ensure_generator_state_is_cudagraph_safe
        fwd_buffer_reuse_ref_count bwd_buffer_reuse_ref_count create_cudagraphs delete_cuda_graphs _layer_is_graphable
        convert_schedule_table_to_order get_overlap_moe_expert_parallel_comm_order set_current_microbatch
        _wrap_graph_for_vision get_vision_cuda_graph_seq_length
    """,
    "CudagraphBufferMetadata": """
        is_cudagraph_input is_cudagraph_output input_use_count cudagraph_reuse_ref_count capture_reuse_count
        fwd_cudagraph_buffer bwd_cudagraph_buffer
    """,
    "ArgMetadata": "zeros_like",
    "TensorReusePool": "tensor_strong_refs tensor_strong_refs_dataptrs pool insert owns get",
    "_CudagraphGlobalRecord": """
        cudagraph_created cudagraph_record cudagraph_inference_record tensor_reuse_pool record_fwd_graph
        record_bwd_graph create_cudagraphs
    """,
    "_GraphStatus": "FWD_READY BWD_READY",
    "_CudagraphRecordNode": "forward backward",
    "_CudagraphReplayNode": "forward backward",
    "_CudaGraphRunner": """
        __str__ get_quantization_context get_connected_params create_fwd_graph create_bwd_graph
        apply_cudagraph_record_metadata record_graph_capture replay_graph_capture get_mismatch_errors get_arg_metas
        get_tensors to_list
    """,
    "CudaGraphManager": "global_mempool call_ddp_preforward_hook get_cudagraph_runner __call__",
    "TECudaGraphHelper": """
        _discover_layers graphs_created _get_sample_arguments _get_cuda_graph_input_data _start_capturing
        _finish_capturing create_cudagraphs cuda_graph_set_manual_hooks delete_cuda_graphs
    """,
    "VisionTECudaGraphHelper": """
        _discover_layers _start_capturing _finish_capturing _get_sample_arguments create_cudagraphs
        cuda_graph_set_manual_hooks
    """,
}


@pytest.mark.parametrize("owner", DOCUMENTED)
def test_every_documented_name_exists(owner):
    where = getattr(cuda_graphs, owner) if owner else cuda_graphs
    assert [name for name in DOCUMENTED[owner].split() if not hasattr(where, name)] == []


def test_pool_reuses_free_tensors():
    pool, meta = cuda_graphs.TensorReusePool(), cuda_graphs.ArgMetadata(torch.ones(2, 3))
    tensor = pool.get(meta)
    assert pool.owns(tensor)
    assert pool.get(meta) is not tensor
    pool.insert(tensor)
    assert pool.get(meta) is tensor


# One name of each kind, with the files of the package whose functions use it
PATCHED: dict[str, tuple[str, list[ModuleType]]] = {
    "function of megatron-core": ("is_graph_capturing", []),
    "imported function": ("get_num_microbatches", [capture_arguments]),
    "function of several files": ("make_graphed_callables", [capture_state]),
    "class": ("_CudaGraphRunner", []),
    "logger": ("logger", [agreement]),
    "module": ("time", [capture_report]),
    "variable": ("_IS_GRAPH_CAPTURING", []),
}


def values(name, files):
    return [getattr(cuda_graphs, name), *(getattr(file, name) for file in files)]


@pytest.fixture(params=list(PATCHED.values()), ids=list(PATCHED))
def patched_name(request):
    """Yield a name and the modules that use it; check afterwards that their namespaces are unchanged."""
    name, files = request.param
    namespaces = [vars(cuda_graphs), *map(vars, files)]
    before = [dict(namespace) for namespace in namespaces]
    yield name, files
    assert [set(namespace) for namespace in namespaces] == [set(namespace) for namespace in before]
    for namespace, original in zip(namespaces, before, strict=True):
        assert all(namespace[key] is original[key] for key in original)


def test_mock_patch_reaches_every_file(patched_name):
    name, files = patched_name
    with mock.patch(f"megatron.core.transformer.cuda_graphs.{name}", "new"):
        assert set(values(name, files)) == {"new"}


def test_functions_call_the_patched_name():
    called = KeyError("called")
    patch = mock.patch("megatron.core.transformer.cuda_graphs._clone_nested_tensors", side_effect=called)
    with patch, pytest.raises(KeyError, match="called"):
        cuda_graphs._ensure_generator_state_is_cudagraph_safe(mock.Mock())


def test_functions_return_the_assigned_variable():
    with mock.patch("megatron.core.transformer.cuda_graphs._IS_GRAPH_CAPTURING", True):
        assert cuda_graphs.is_graph_capturing()
    assert not cuda_graphs.is_graph_capturing()


def test_functions_assign_the_variable():
    cuda_graphs._set_capture_start()
    assert cuda_graphs._IS_GRAPH_CAPTURING
    cuda_graphs._set_capture_end()
    assert not cuda_graphs._IS_GRAPH_CAPTURING


def test_other_object_of_the_same_name_stays():
    from megatron.core.transformer._cuda_graphs.engine import plan

    before = dict(vars(plan))
    with mock.patch("megatron.core.transformer.cuda_graphs.tree_map"):
        assert "tree_map" in before
        assert vars(plan) == before


def test_new_name_stays_in_the_module():
    with mock.patch("megatron.core.transformer.cuda_graphs.something_new", 1, create=True):
        assert vars(cuda_graphs)["something_new"] == 1
        assert not hasattr(agreement, "something_new")
    assert not hasattr(cuda_graphs, "something_new")
