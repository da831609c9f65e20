"""What step_files counts: functions of the patch, and nothing else."""

from benchmarks.step_files import noted
from megatron.core.transformer._cuda_graphs.flags import table
from megatron_fsdp_cuda_graphs import overlay


def test_functions_of_the_patch_are_counted_by_file(monkeypatch):
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    files: dict[str, int] = {}
    with noted(files):
        table.allocator_problem()
        table.allocator_problem()
        overlay.tree_file("megatron.core.transformer.cuda_graphs")
        " ".join(map(str, range(3)))
    table.allocator_problem()
    assert files == {"core/transformer/_cuda_graphs/flags/table.py": 2}
