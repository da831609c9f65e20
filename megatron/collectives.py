"""The methods of torch's ``ProcessGroup`` through which Python launches work, of torch 2.11 to 2.15.

torch renames them: from 2.13 on ``torch.distributed`` launches ``all_gather_single`` where it launched
``_allgather_base``. A unit test compares them with those of the installed torch.
"""

from torch.distributed import ProcessGroup


def _present(*names: str) -> tuple[str, ...]:
    return tuple(name for name in names if hasattr(ProcessGroup, name))


# Their first argument holds the tensors that they write.
WRITING = _present(
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "gather_into_tensor", "gather_single"),
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)
BARRIERS = _present("barrier", "monitored_barrier")
BETWEEN_TWO = _present("send", "recv", "recv_anysource")
BEGIN_BATCH, END_BATCH = "_start_coalescing", "_end_coalescing"
