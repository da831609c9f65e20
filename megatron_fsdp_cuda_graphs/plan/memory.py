"""The memory of one rank, summed over the tensors that megatron-core makes for it."""

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.pipelines import take_in_turn
from megatron.core.distributed.fsdp.src.megatron_fsdp.optimizer_gradients import gradient_name
from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_global_memory_buffer
from megatron.core.transformer._cuda_graphs.flags.options import alltoall_capacity_factor, grouped_tensor
from megatron.core.transformer.moe.equal_splits import capacity_of_peer

from ..overlay import upstream
from .graphs import Planned

# megatron-core's own, which plans no copies and so asks for no addresses.
_ParamAndGradBuffer = upstream(
    "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"
).ParamAndGradBuffer

MIB = 2**20
# In the order in which they are shown.
KINDS = {
    "weights": "weights: FSDP's shards",
    "main_weights": "main weights: the optimizer's shards",
    "gradients": "main gradients: FSDP's shards",
    "double_buffer": "double buffer: two FSDP units, weights and gradients",
    "persistent_buffers": "persistent buffers: what does not fit the double buffer",
    "kept_weights": "gathered weights that graphs read, which stay in place",
    "optimizer_states": "optimizer's states",
    "optimizer_gradients": "optimizer's gradients, in its dtype",
    "static_inputs": "static inputs of graphs",
}


def stage_memory(helper: Any, planned: Planned, args: argparse.Namespace) -> Iterator[str]:
    """Yield the memory of one rank of a pipeline stage, a line for each kind, in MiB.

    Args:
        helper: The ``TECudaGraphHelper`` of the stage.
        planned: The graphs that it would capture.
    """
    found = fsdp_memory(helper, args)
    found["static_inputs"] = distinct_bytes(planned.static_inputs)
    yield from (f"    {found[kind] / MIB:10.1f}  {words}" for kind, words in KINDS.items() if found[kind])
    yield f"    {sum(found.values()) / MIB:10.1f}  in all"
    if args.optimizer != "adam":
        yield f"    the states of --optimizer {args.optimizer} are not known, and not counted"
    if args.fp8_param_gather or args.fp4_param_gather:
        yield "    quantized parameters are counted as if they were not quantized"
    if not args.use_megatron_fsdp:
        yield "    without --use-megatron-fsdp only static inputs are counted"
    sizes = helper.config, helper.seq_length, helper.micro_batch_size
    if room := rows_of_experts(*sizes):
        yield f"    {room['bytes'] / MIB:10.1f}  not counted: {room['rows']} rows of tokens that experts have room for"
        yield "                in each MoE layer, as often as activations of experts are kept"
    pool = activation_bytes(*sizes, planned.most_in_flight)
    if pool is None or args.cuda_graph_modules or not planned.graphs:
        yield "    the graphs' pool is not estimated for these layers"
        return
    yield f"    {pool / MIB:10.1f}  estimated: activations in the graphs' pool. Where one graph holds all layers, the"
    yield "                optimizer's gradients lie in the same memory, as activations are dead by then"


def fsdp_memory(helper: Any, args: argparse.Namespace) -> Counter[str]:
    """Sum the bytes that Megatron-FSDP and the optimizer keep, by the names in ``KINDS``; no bucket may be in use."""
    found: Counter[str] = Counter()
    for buffer in fsdp_buffers(helper):
        for group in buffer.parameter_groups:
            # With hybrid sharding the former is a part of the latter.
            found["weights"] += _bytes(group.hfsdp_helper_wbuf or group.model_weight_buffer)
            found["weights"] += _bytes(group.hfsdp_helper_wtbuf or group.transpose_weight_buffer)
            found["main_weights"] += _bytes(group.main_weight_buffer)
            found["gradients"] += _bytes(group.hfsdp_helper_gbuf or group.main_grad_buffer)
        if args.overlap_moe_expert_parallel_comm:
            found["kept_weights"] += sum(map(_kept_bytes, buffer.parameter_groups))
        _use_temporary_buffers(buffer)
        found.update(temporary_buffers(buffer))
        found.update(_optimizer(buffer, args))
    return found


def fsdp_buffers(helper: Any) -> list[Any]:
    """Return the ``ParamAndGradBuffer`` of each model chunk that is under Megatron-FSDP."""
    return [chunk.fsdp.param_and_grad_buffer for chunk in helper.stage.chunks if chunk.fsdp is not None]


def temporary_buffers(buffer: Any) -> Counter[str]:
    """Sum the fixed buffers that exist for ``buffer`` so far, by the names in ``KINDS``."""
    allocators = (buffer.weight_alloc, buffer.transpose_weight_alloc, buffer.main_grad_alloc)
    names = tuple(f"{allocator.name}_" for allocator in allocators if hasattr(allocator, "name"))
    found: Counter[str] = Counter()
    for (name, _), tensor in get_global_memory_buffer().buffer.items():
        if name.startswith(names):
            found["persistent_buffers" if "_not_fit_in_" in name else "double_buffer"] += tensor.nbytes
    return found


def distinct_bytes(tensors: Any) -> int:
    """The memory of all tensors in a nested structure, those that share storage counted once."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def activation_bytes(config: Any, seq_length: int, micro_batch_size: int, layers: int) -> int | None:
    """Estimate what whole dense layers keep from forward to backward with fused attention and 16-bit activations.

    The terms are those of "Reducing Activation Recomputation in Large Transformer Models"
    (https://arxiv.org/abs/2205.05198), section 4.1, without that of attention's matrix, 5as/h. Of layers that are
    computed again, inputs are kept, and all else of as many as are computed at a time.

    Args:
        config: A ``TransformerConfig``.
        layers: How many layers' forward pass has run, and not their backward pass.

    Returns:
        Bytes; None for other layers or dtypes, or where other parts of layers than attention are computed again.
    """
    selective = config.recompute_granularity == "selective" and config.recompute_modules != ["core_attn"]
    if config.num_moe_experts or selective or config.fp8 or not (config.bf16 or config.fp16):
        return None
    tokens = seq_length * micro_batch_size // config.context_parallel_size
    parts = config.tensor_model_parallel_size
    divided = 8 * config.hidden_size + config.ffn_hidden_size * (6 if config.gated_linear_unit else 4)
    others = 10 * config.hidden_size  # inputs of norms and of projections, masks of dropout
    shares = parts if config.sequence_parallel else 1
    of_layer = tokens * (divided // parts + others // shares)
    if config.recompute_granularity != "full":
        return of_layer * layers
    of_input = tokens * 2 * config.hidden_size // shares
    recomputed = min(config.recompute_num_layers, layers)
    if config.recompute_method == "block":  # the first layers, one at a time, after those that are kept
        return of_input * recomputed + of_layer * max(layers - recomputed, 1)
    return of_input * -(-layers // config.recompute_num_layers) + of_layer * recomputed


def rows_of_experts(config: Any, seq_length: int, micro_batch_size: int) -> Counter[str]:
    """Sum the room for tokens that experts of several ranks have in each MoE layer.

    Returns:
        Number of ``rows``, and ``bytes`` of one tensor of them; empty where there are no more rows than are used.
    """
    ranks = config.expert_model_parallel_size
    if not config.num_moe_experts or not grouped_tensor(config) or ranks == 1:
        return Counter()
    parts = config.context_parallel_size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    top_k = config.moe_router_topk
    pairs = seq_length * micro_batch_size // parts * top_k
    of_each_rank = capacity_of_peer(
        pairs, top_k, config.num_moe_experts // ranks, ranks, alltoall_capacity_factor(config)
    )
    rows, width = ranks * of_each_rank, config.moe_latent_size or config.hidden_size
    return Counter(rows=rows, bytes=rows * width * config.params_dtype.itemsize)


def _use_temporary_buffers(buffer: Any) -> None:
    """Let Megatron-FSDP take the buckets of two units at a time, as in training."""
    units: dict[int | None, list[Any]] = {}
    for group in buffer.parameter_groups:
        units.setdefault(group.fsdp_unit_id, []).append(group)
    weights = [
        [each for group in groups for each in (group.model_weight_buffer, group.transpose_weight_buffer) if each]
        for groups in units.values()
    ]
    take_in_turn(weights)
    gradients = [[group.main_grad_buffer for group in groups if group.main_grad_buffer] for groups in units.values()]
    take_in_turn(gradients, buffer.mp_policy.grad_comm_dtype)


def _optimizer(buffer: Any, args: argparse.Namespace) -> Counter[str]:
    found: Counter[str] = Counter()
    _ParamAndGradBuffer.update_main_grads(buffer)
    for _, param in buffer.optimizer_named_parameters:
        gradient = getattr(param, gradient_name(buffer.use_decoupled_grad), None)
        if gradient is None:
            continue
        local = gradient._local_tensor
        main = buffer.parameter_groups[buffer.param_to_param_group[param.orig_param]].main_grad_buffer
        found["optimizer_gradients"] += local.nbytes if local.dtype != main.dtype else 0  # otherwise a view
        found["optimizer_states"] += local.numel() * _bytes_of_states(args)
    return found


def _bytes_of_states(args: argparse.Namespace) -> int:
    """The optimizer's states for one element, in bytes."""
    return int(args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize) if args.optimizer == "adam" else 0


def _kept_bytes(group: Any) -> int:
    """The weights of a bucket that graphs of what precedes experts keep in place, in bytes."""
    weights = group.model_weight_buffer
    released = group.fsdp_unit_id is not None and weights.is_data_distributed
    return 0 if group.is_expert_param or not released else int(weights.bucket_index.size * weights.dtype.itemsize)


def _bytes(buffer: Any) -> int:
    return 0 if buffer is None or buffer.data is None else int(buffer.data.nbytes)
