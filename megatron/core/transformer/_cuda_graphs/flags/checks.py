"""Options that do not fit graphs of a sharded model, or grouped experts: one check for flags and configurations."""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from megatron.core.utils import log_single_rank

from ..errors import OptionsError
from ..hooks import must_run_outside
from .options import Options
from .own import FACTOR_FLAG, GROUPED_FLAG
from .table import MEGATRON_FSDP, TABLE, TORCH_FSDP, Row, Verdict

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

# torch reads both spellings; the second is the older one.
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_NO_LOCAL_GRAPHS = next(row.words for row in TABLE if row.graphs == ("local",))


def check_flags(flags: Any) -> None:
    """Check parsed flags, before or after megatron-core's validation.

    Args:
        flags: Any object with attributes as of Megatron's parsed flags.

    Raises:
        ValueError: the model is to be sharded and flags do not fit its CUDA graphs; all are listed.
    """
    sharding = _sharding(Options(flags))
    if sharding is not None:
        check_fsdp_options(flags, sharding=sharding)


def warn_of_flags(flags: Any) -> None:
    """Log a line for each flag that has no effect, or was not tried, with CUDA graphs of a sharded model."""
    for row in rows_of_flags(flags):
        if row.verdict in (Verdict.NO_EFFECT, Verdict.NOT_TRIED):
            log_single_rank(logger, logging.WARNING, row.words)


def rows_of_flags(flags: Any) -> list[Row]:
    """Return the rows of the table that parsed ``flags`` are in; none if they shard no model."""
    options = Options(flags)
    sharding = _sharding(options)
    return [] if sharding is None else _rows(options, sharding)


def check_fsdp_options(*sources: Any, sharding: str = MEGATRON_FSDP) -> None:
    """Check the options of a sharded model for CUDA graphs.

    Args:
        sources: Where the options are; see ``Options``.

    Raises:
        ValueError: a flag is missing or does not fit; all such flags are listed, with the reasons.
    """
    options = Options(*sources)
    problems = [row.words for row in _rows(options, sharding) if row.verdict is Verdict.REFUSED]
    if problems:
        raise ValueError(
            f"{sharding} with --cuda-graph-impl {options.implementation}:\n" + "\n".join(f"- {p}" for p in problems)
        )


def _rows(options: Options, sharding: str) -> list[Row]:
    return [row for row in TABLE if row.applies(options, sharding)]


def _sharding(options: Options) -> str | None:
    """The flag that shards the model; None if there is none."""
    if options.get("use_megatron_fsdp"):
        return MEGATRON_FSDP
    return TORCH_FSDP if options.get("use_torch_fsdp2") else None


def refuse_fsdp_hooks(module: torch.nn.Module) -> None:
    """Refuse a module for local graphs if Megatron-FSDP has registered hooks on it or its submodules.

    Raises:
        ValueError: Megatron-FSDP has such a hook.
    """
    for part in module.modules():
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            if must_run_outside(hook):
                raise ValueError(f"--use-megatron-fsdp with --cuda-graph-impl local: {_NO_LOCAL_GRAPHS}")


def _tensor_parallel_experts(options: Options) -> bool:
    given = options.get("expert_tensor_parallel_size")
    return options.several("tensor_model_parallel_size") if given is None else int(given) > 1


# What --moe-use-grouped-tensor does not fit, with or without graphs: whether it is there, and why not or what to do.
_OTHERS: tuple[tuple[Callable[[Options], Any], str], ...] = (
    (lambda o: not o.has_experts, "needs --num-experts above 1"),
    (
        lambda o: o.get("moe_expert_capacity_factor") is not None,
        "drops and pads no tokens: leave out --moe-expert-capacity-factor and --moe-pad-expert-input-to-capacity",
    ),
    (lambda o: o.any("fp8", "fp4"), "computes no FP8 or FP4: leave out --fp8-format and --fp4-format"),
    (lambda o: o.get("fp16"), "computes no FP16: give --bf16 in place of --fp16"),
    (
        lambda o: any((o.get(size) or 0) % 8 for size in ("hidden_size", "moe_ffn_hidden_size", "moe_latent_size")),
        "needs rows of 16 bytes or multiples: set --hidden-size, --moe-ffn-hidden-size and --moe-latent-size to "
        "multiples of 8",
    ),
    (
        lambda o: o.get("moe_token_dispatcher_type") == "flex",
        "needs --moe-token-dispatcher-type alltoall or allgather: the kernels of flex ask the host",
    ),
    (
        _tensor_parallel_experts,
        "needs experts that are whole on a rank: set --expert-tensor-parallel-size 1",
    ),
    (
        lambda o: (
            o.any("delay_wgrad_compute", "overlap_moe_expert_parallel_comm")
            or o.get("overlap_dispatch_backward_with_experts_wgrad")
        ),
        "computes weight gradients in the backward pass of their layer: leave out --delay-wgrad-compute, "
        "--overlap-moe-expert-parallel-comm and --overlap-dispatch-backward-with-experts-wgrad",
    ),
    (lambda o: o.recomputes("moe_act"), "keeps activations of experts: leave moe_act out of --recompute-modules"),
    (
        lambda o: (
            o.get("fine_grained_activation_offloading")
            and not {"expert_fc1", "moe_act", "fused_group_mlp"}.isdisjoint(o.get("offload_modules", ()))
        ),
        "keeps activations of experts: leave expert_fc1, moe_act and fused_group_mlp out of --offload-modules",
    ),
    (
        lambda o: o.any("use_transformer_engine_op_fuser", "moe_mlp_glu_interleave_size"),
        "takes the place of TransformerEngine's fused experts: leave out --use-transformer-engine-op-fuser and "
        "--moe-mlp-glu-interleave-size",
    ),
    (
        lambda o: o.any("moe_single_grouped_weight", "moe_single_grouped_bias"),
        "reads a parameter of each expert: leave out --moe-single-grouped-weight and --moe-single-grouped-bias",
    ),
    (
        lambda o: o.get("transformer_impl") == "inference_optimized",
        "is for training: leave out --transformer-impl inference_optimized",
    ),
    (
        lambda o: o.get("use_torch_fsdp2") or o.get("gtp_weight_remat_size", 1) > 1,
        "was not tried with --use-torch-fsdp2 and sharded weights (--tensor-parallel-num-weight-shards): leave it out",
    ),
)
# The same of --moe-alltoall-capacity-factor.
_OTHERS_OF_FACTOR: tuple[tuple[Callable[[Options], Any], str], ...] = (
    (
        lambda o: (
            not o.grouped_tensor
            or o.get("moe_token_dispatcher_type", "allgather") != "alltoall"
            or not o.several("expert_model_parallel_size")
        ),
        f"needs {GROUPED_FLAG}, --moe-token-dispatcher-type alltoall and --expert-model-parallel-size above 1",
    ),
    (
        lambda o: o.get("rerun_mode", "validate_results") != "validate_results",
        "runs steps again: set --rerun-mode validate_results",
    ),
    (
        lambda o: o.implementation not in ("none", "transformer_engine"),
        "runs steps again eagerly, which graphs of --cuda-graph-impl local and full_iteration do not allow",
    ),
    (
        lambda o: o.stages > 1 or o.get("fine_grained_activation_offloading"),
        "was not tried with --pipeline-model-parallel-size and --fine-grained-activation-offloading: leave it out",
    ),
    (
        lambda o: o.any("qk_clip", "log_max_attention_logit"),
        "cannot take back what --qk-clip and --log-max-attention-logit have seen: leave it or these out",
    ),
)


def check_grouped_tensor(*sources: Any) -> None:
    """Check what else parsed flags or a configuration say where --moe-use-grouped-tensor is given, and of its bounds.

    Args:
        sources: Where the options are; see ``Options``.

    Raises:
        OptionsError: something does not fit; all of it is listed, with what to do.
    """
    options = Options(*sources)
    bounded = options.get("moe_alltoall_capacity_factor") is not None
    rows = [(GROUPED_FLAG, row) for row in _OTHERS if options.grouped_tensor]
    rows += [(FACTOR_FLAG, row) for row in _OTHERS_OF_FACTOR if bounded]
    problems = [f"{flag} {words}" for flag, (applies, words) in rows if applies(options)]
    if problems:
        raise OptionsError("\n".join(problems))


def allocator_problem() -> str | None:
    """Say what is wrong with the allocator's settings in the environment, and what to do; None if nothing is.

    Memory segments that expand are mapped anew as they grow, and NCCL registers the memory that it finds in a graph by
    its address.
    """
    if os.environ.get("NCCL_GRAPH_REGISTER") == "0":
        return None
    for variable in _ALLOCATOR_SETTINGS:
        if "expandable_segments:True" in "".join(os.environ.get(variable, "").split()):
            return (
                f"{variable}=expandable_segments:True needs NCCL_GRAPH_REGISTER=0 with CUDA graphs: NCCL would "
                "register memory that moves. Set NCCL_GRAPH_REGISTER=0."
            )
    return None
