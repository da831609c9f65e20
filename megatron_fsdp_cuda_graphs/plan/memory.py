"""Sum the memory of the tensors that megatron-core and Megatron-FSDP create on one rank."""

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.pipelines import take_in_turn
from megatron.core.distributed.fsdp.src.megatron_fsdp.optimizer_gradients import gradient_name
from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_global_memory_buffer
from megatron.core.transformer._cuda_graphs.te.capture_state import CaptureScope, Holds

from ..overlay import upstream
from .graphs import Planned
from .pools import Passes, why_unknown

# megatron-core's original class plans no copies, so tensors without addresses suffice.
_ParamAndGradBuffer = upstream(
    "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"
).ParamAndGradBuffer

MIB = 2**20
KINDS = {
    "weights": "weights: FSDP shards",
    "main_weights": "main weights: optimizer shards",
    "gradients": "main gradients: FSDP shards",
    "double_buffer": "double buffer: two FSDP units, weights and gradients",
    "persistent_buffers": "persistent buffers: buckets that do not fit the double buffer",
    "optimizer_states": "optimizer states",
    "optimizer_gradients": "optimizer gradients, in the dtype of the optimizer",
    "static_inputs": "static inputs of graphs",
    "graph_pool": "graph pool: activations beyond the optimizer gradients, whose memory they reuse",
}


def stage_memory(helper: Any, scope: CaptureScope, planned: Planned, args: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each kind of memory on one rank of a pipeline stage, in MiB.

    Args:
        helper: The ``TECudaGraphHelper`` of the stage.
        scope: The part of the model in each graph.
        planned: The graphs that ``helper`` would capture.
        args: Validated arguments.
    """
    found = fsdp_memory(helper, args)
    found["static_inputs"] = distinct_bytes(planned.static_inputs)
    unknown = why_unknown(helper, args, of_layers=scope.holds is Holds.LAYER)
    if not (planned.why_nothing or unknown):
        found["graph_pool"] = graph_pool(helper, planned, args) - found["optimizer_gradients"]
    yield from (f"    {found[kind] / MIB:10.1f}  {words}" for kind, words in KINDS.items() if found[kind])
    yield f"    {sum(found.values()) / MIB:10.1f}  total"
    if unknown and not planned.why_nothing:
        yield f"    not counted: the graph pool, because of {unknown}"
    if args.optimizer != "adam":
        yield f"    not counted: the states of --optimizer {args.optimizer}"
    if args.fp8_param_gather or args.fp4_param_gather:
        yield "    quantized parameters are counted in 16 bits"
    if not args.use_megatron_fsdp:
        yield "    only static inputs are counted without --use-megatron-fsdp"


def fsdp_memory(helper: Any, args: argparse.Namespace) -> Counter[str]:
    """Return the bytes that Megatron-FSDP and the optimizer allocate, keyed by ``KINDS``. No bucket may be in use."""
    found: Counter[str] = Counter()
    for buffer in fsdp_buffers(helper):
        for group in buffer.parameter_groups:
            # With HSDP the HSDP helper buffer contains the other one.
            found["weights"] += _bytes(group.hfsdp_helper_wbuf or group.model_weight_buffer)
            found["weights"] += _bytes(group.hfsdp_helper_wtbuf or group.transpose_weight_buffer)
            found["main_weights"] += _bytes(group.main_weight_buffer)
            found["gradients"] += _bytes(group.hfsdp_helper_gbuf or group.main_grad_buffer)
        _use_temporary_buffers(buffer)
        found.update(temporary_buffers(buffer))
        found.update(_optimizer(buffer, args))
    return found


def graph_pool(helper: Any, planned: Planned, args: argparse.Namespace) -> int:
    """Return the bytes of the graph memory pool. Call ``fsdp_memory`` first: it sets the optimizer's gradients."""
    gradients: Counter[int] = Counter()
    for buffer in fsdp_buffers(helper):
        for main, local in _optimizer_gradients(buffer):
            gradients[id(main)] += local.nbytes if local.dtype != main.dtype else 0
    return Passes(helper, args).run(planned.order, [*gradients.values()])


def fsdp_buffers(helper: Any) -> list[Any]:
    """Return the ``ParamAndGradBuffer`` of each model chunk under Megatron-FSDP."""
    return [chunk.fsdp.param_and_grad_buffer for chunk in helper.stage.chunks if chunk.fsdp is not None]


def temporary_buffers(buffer: Any) -> Counter[str]:
    """Return the bytes of the fixed buffers allocated for ``buffer`` so far, keyed by ``KINDS``."""
    allocators = (buffer.weight_alloc, buffer.transpose_weight_alloc, buffer.main_grad_alloc)
    names = tuple(f"{allocator.name}_" for allocator in allocators if hasattr(allocator, "name"))
    found: Counter[str] = Counter()
    for (name, _), tensor in get_global_memory_buffer().buffer.items():
        if name.startswith(names):
            found["persistent_buffers" if "_not_fit_in_" in name else "double_buffer"] += tensor.nbytes
    return found


def distinct_bytes(tensors: Any) -> int:
    """Return the bytes of all distinct storages of the tensors in a nested structure."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _use_temporary_buffers(buffer: Any) -> None:
    """Allocate the buckets of two FSDP units at a time, as training does."""
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
    of_element = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize if args.optimizer == "adam" else 0
    _ParamAndGradBuffer.update_main_grads(buffer)
    for main, local in _optimizer_gradients(buffer):
        found["optimizer_gradients"] += local.nbytes if local.dtype != main.dtype else 0  # a view if the dtypes match
        found["optimizer_states"] += local.numel() * of_element
    return found


def _optimizer_gradients(buffer: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield, for each gradient of the optimizer, its main gradient buffer and its local shard."""
    for _, param in buffer.optimizer_named_parameters:
        gradient = getattr(param, gradient_name(buffer.use_decoupled_grad), None)
        if gradient is not None:
            group = buffer.parameter_groups[buffer.param_to_param_group[param.orig_param]]
            yield group.main_grad_buffer, gradient._local_tensor


def _bytes(buffer: Any) -> int:
    return 0 if buffer is None or buffer.data is None else int(buffer.data.nbytes)
