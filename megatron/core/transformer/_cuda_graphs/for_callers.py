"""Names of megatron-core's ``cuda_graphs`` for its callers: functions that no graph here uses, and what it imports.

TransformerEngine, tqdm and generalized tensor parallelism (GTP) are optional, as in megatron-core: ``HAVE_TE_GRAPHS``,
``HAVE_TQDM`` and ``HAVE_GTP`` are True if they can be imported.
"""
# ruff: noqa: F401

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    get_all_rng_states,
    get_cuda_rng_tracker,
    is_checkpointing,
)
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.module import GraphableMegatronModule, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_torch_version,
    is_te_min_version,
    log_on_each_pipeline_stage,
    log_single_rank,
)

from .engine.memory import weak_reference

try:
    import transformer_engine as te
    from transformer_engine.pytorch.distributed import is_fp8_activation_recompute_enabled
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
    from transformer_engine.pytorch.graph import restore_fp8_tensors, save_fp8_tensors
    from transformer_engine.pytorch.graph import set_capture_end as te_set_capture_end
    from transformer_engine.pytorch.graph import set_capture_start as te_set_capture_start
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.utils import make_weak_ref

    HAVE_TE_GRAPHS = True
except Exception:  # a wheel without a CUDA driver fails in many ways
    HAVE_TE_GRAPHS = False

try:
    from megatron.core.tensor_parallel.gtp_api import HAVE_GTP
except ImportError:
    HAVE_GTP = False

if HAVE_GTP:
    from megatron.core.tensor_parallel.gtp_api import (
        GTPChain,
        get_ag_stream,
        get_rs_stream,
        set_cuda_graph_mempool,
        wait_async_comms,
    )
else:
    GTPChain = get_ag_stream = get_rs_stream = set_cuda_graph_mempool = wait_async_comms = None

try:
    from tqdm import tqdm

    HAVE_TQDM = True
except ImportError:
    HAVE_TQDM = False

MainGrads = dict[int, tuple[torch.nn.Parameter, torch.Tensor]]


def _set_skip_fp8_weight_update_tensor(skip: bool) -> None:
    """Set the flag that makes graphs of quantized layers reuse the quantized weights of an earlier micro-batch.

    The flag is a CUDA tensor of one fp32 element. It is allocated once, as graphs read it at its address. Without
    TransformerEngine this does nothing.
    """
    if not HAVE_TE_GRAPHS:
        return
    manager: Any = FP8GlobalStateManager
    if hasattr(manager, "set_skip_fp8_weight_update_tensor"):
        manager.set_skip_fp8_weight_update_tensor(skip)
        return
    quantization = manager.quantization_state  # some versions (2.15) have the field and no setter
    flag = quantization.skip_fp8_weight_update_tensor
    if flag is None:
        flag = quantization.skip_fp8_weight_update_tensor = torch.empty(1, dtype=torch.float32, device="cuda")
    flag.fill_(skip)


def make_weakref(ten: Any, inplace: bool = True) -> Any:
    """Stop keeping the memory of ``ten`` alive, if it is from the pool of local graphs: later captures may use it.

    Args:
        ten: A tensor of ``alloc_tensor_from_graph_mempool``, which marks it with ``is_from_global_mempool``; anything
            else is returned as it is.
        inplace: Whether ``ten`` itself is changed and returned. Otherwise a tensor over the same memory is returned,
            which does not own it.
    """
    if not (isinstance(ten, torch.Tensor) and getattr(ten, "is_from_global_mempool", False)):
        return ten
    weak = weak_reference(ten)
    if not inplace:
        return weak
    ten.data = weak
    return ten


def create_strong_ref(ten: torch.Tensor) -> torch.Tensor:
    """Return a leaf that shares the memory of ``ten`` and keeps it allocated.

    It has the ``requires_grad``, ``is_from_global_mempool`` and ``can_skip_replay_copy`` of ``ten``, and a copy of its
    ``cg_buffer_metadata``.
    """
    strong = ten.detach().requires_grad_(ten.requires_grad)
    attributes = vars(ten)
    strong.__dict__.update({name: attributes[name] for name in _COPIED if name in attributes})
    if "cg_buffer_metadata" in attributes:
        strong.__dict__["cg_buffer_metadata"] = copy.deepcopy(attributes["cg_buffer_metadata"])
    return strong


_COPIED = ("is_from_global_mempool", "can_skip_replay_copy")


def _backup_grads_before_capture(runner: Any) -> MainGrads:
    """Copy the main gradients that the warm-up of ``runner`` may add to.

    Returns:
        By the ``id`` of each parameter with a ``main_grad``: the parameter, and a copy of its ``main_grad``.
    """
    return {
        id(param): (param, param.main_grad.clone())
        for param in _params_written_by(runner)
        if getattr(param, "main_grad", None) is not None
    }


def _restore_grads_after_capture(backup: MainGrads) -> None:
    """Restore what ``_backup_grads_before_capture`` copied; each ``main_grad`` stays at its address."""
    for param, main_grad in backup.values():
        param.main_grad.copy_(main_grad)


def _params_written_by(runner: Any) -> Iterator[Any]:
    for param in runner.base_module.parameters():
        yield param
        # Generalized tensor parallelism finishes the gradient of the next sharded weight in this graph.
        if runner.gtp_remat and getattr(param, "is_gtp_weight_remat", False):
            following = getattr(param, "next_w", None)
            if following is not None:
                yield from following.weight_list if getattr(following, "is_routed_expert", False) else (following,)


def annotate_first_last_layer(layers: Sequence[torch.nn.Module]) -> None:
    """Set ``is_first_layer`` and ``is_last_layer`` of each of ``layers``, the layers of one model chunk in order."""
    last = len(layers) - 1
    for index, layer in enumerate(layers):
        layer.is_first_layer = index == 0
        layer.is_last_layer = index == last


def _determine_if_first_last_layer_of_this_vp_chunk(base_module: torch.nn.Module) -> tuple[bool, bool]:
    """Whether ``base_module`` is the first, and whether it is the last layer of its chunk.

    A chunk is the part of the model of one pipeline rank and virtual pipeline stage. The annotations of
    ``annotate_first_last_layer`` are used if the module has them; otherwise ``layer_number`` (from 1, over the whole
    model) and the layout of the model's ``TransformerConfig`` over pipeline ranks and virtual stages. A module without
    a layer number is a chunk of its own.

    Raises:
        ValueError: no chunk of the model has a layer of this number.
    """
    if hasattr(base_module, "is_first_layer") and hasattr(base_module, "is_last_layer"):
        return bool(base_module.is_first_layer), bool(base_module.is_last_layer)
    if not hasattr(base_module, "layer_number"):
        return True, True
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    number, config = base_module.layer_number, base_module.config
    stages = config.virtual_pipeline_model_parallel_size
    for rank in range(config.pipeline_model_parallel_size):
        for stage in (None,) if stages is None else range(stages):
            before = get_transformer_layer_offset(config, stage, rank)
            count = get_num_layers_to_build(config, stage, rank)
            if before < number <= before + count:
                return number == before + 1, number == before + count
    raise ValueError(f"layer_number {number} is in no pipeline stage of a model with --num-layers {config.num_layers}")
