"""What step_files counts: functions of the patch, and nothing else."""

from benchmarks.step_files import noted
from megatron_fsdp_cuda_graphs import allocator_check, overlay


def test_functions_of_the_patch_are_counted_by_file(monkeypatch):
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    files: dict[str, int] = {}
    with noted(files):
        allocator_check.allocator_problem()
        allocator_check.allocator_problem()
        overlay.tree_file("megatron.core.transformer.cuda_graphs")
        " ".join(map(str, range(3)))
    allocator_check.allocator_problem()
    assert files == {"allocator_check.py": 2}
