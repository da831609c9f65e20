"""Whether CUDA's caching allocator is set up in a way that CUDA graphs with NCCL can bear."""

import os

# torch reads both spellings; the second is the older one.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allocator_problem() -> str | None:
    """Say what is wrong with the allocator's settings in the environment, and what to do; None if nothing is.

    Memory segments that expand are mapped anew as they grow, and NCCL registers the memory that it finds in a graph by
    its address.
    """
    if os.environ.get("NCCL_GRAPH_REGISTER") == "0":
        return None
    for variable in _VARIABLES:
        if "expandable_segments:True" in "".join(os.environ.get(variable, "").split()):
            return (
                f"{variable}=expandable_segments:True needs NCCL_GRAPH_REGISTER=0 with CUDA graphs: NCCL would "
                "register memory that moves. Set NCCL_GRAPH_REGISTER=0."
            )
    return None
