"""The options that Megatron-FSDP needs for per-layer CUDA graphs; one check for flags and for configurations."""

from typing import Any

import torch

from .hooks import must_run_outside

# With these a graph holds a whole iteration, FSDP's buffers included, or there are no graphs.
_NOT_PER_LAYER = ("none", "full_iteration")

_REQUIRED = {
    "fsdp_double_buffer": (
        "--fsdp-double-buffer",
        "without it parameters are gathered to another address in every iteration, and a graph reads the old one",
    ),
    "fsdp_db_use_persist_buf_on_alloc_fail": (
        "--fsdp-db-use-persist-buf-on-alloc-fail",
        "without it a bucket that does not fit the double buffer is allocated anew in every iteration, and replaying a "
        "graph then is an illegal memory access",
    ),
}


_NO_LOCAL_GRAPHS = (
    "--cuda-graph-impl local runs no FSDP hooks around its graphs: use --cuda-graph-impl transformer_engine"
)


def check_fsdp_options(cuda_graph_impl: str, options: Any, *, gradient_accumulation_fusion: bool = False) -> None:
    """Check the options of a model that Megatron-FSDP wraps for per-layer graphs.

    Args:
        cuda_graph_impl: As in ``--cuda-graph-impl``.
        options: An object with the attributes of ``DistributedDataParallelConfig`` (or of the parsed arguments).
        gradient_accumulation_fusion: Whether weight gradients are added to the main gradients by the layers.

    Raises:
        ValueError: a flag is missing or does not fit; all such flags are listed, with the reasons.
    """
    if cuda_graph_impl in _NOT_PER_LAYER:
        return
    problems = [f"{flag} is required: {why}" for name, (flag, why) in _REQUIRED.items() if not getattr(options, name)]
    if cuda_graph_impl == "local":
        problems.append(_NO_LOCAL_GRAPHS)
    if gradient_accumulation_fusion and options.data_parallel_sharding_strategy != "optim_grads_params":
        problems.append(
            "--no-gradient-accumulation-fusion is required unless --data-parallel-sharding-strategy is "
            "optim_grads_params: only then do the main gradients that a graph would write stay in place"
        )
    if problems:
        raise ValueError(
            f"--use-megatron-fsdp with --cuda-graph-impl {cuda_graph_impl}:\n" + "\n".join(f"- {p}" for p in problems)
        )


def refuse_fsdp_hooks(module: torch.nn.Module) -> None:
    """Refuse a module for local graphs if Megatron-FSDP has registered hooks on it or its submodules.

    Raises:
        ValueError: Megatron-FSDP has such a hook.
    """
    for part in module.modules():
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            if must_run_outside(hook):
                raise ValueError(f"--use-megatron-fsdp with --cuda-graph-impl local: {_NO_LOCAL_GRAPHS}")
