"""Build one pipeline stage of a job on the meta device, with megatron-core and Megatron-FSDP.

This process acts as one rank of the job, and its collectives transfer nothing. Megatron's local layers stand in for
TransformerEngine's, because their parameters have the same shapes.
"""

import argparse
import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partialmethod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer._cuda_graphs.te.capture_state import blocker
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.training import get_megatron_ddp_config
from megatron.training.utils.common_utils import is_hybrid_model

from .. import cpu_backend
from .command import quietly

# Turns off initialization and features of TransformerEngine and Apex, which do not affect parameter shapes.
_NEEDS_A_GPU = {
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "perform_initialization": False,
    "use_cpu_initialization": False,  # would allocate memory
}


@contextlib.contextmanager
def dry_stage(args: argparse.Namespace, stage: int) -> Iterator[Any]:
    """Build the model of the first rank of a pipeline stage, and yield its ``TECudaGraphHelper``.

    Args:
        args: Validated arguments, with ``cuda_graph_impl`` ``transformer_engine``.
        stage: The stage, counted from 0.

    Raises:
        Exception: megatron-core cannot build the model.
    """
    with ExitStack() as stack:
        stack.enter_context(_rank(args, stage * (args.world_size // args.pipeline_model_parallel_size)))
        stack.enter_context(without_memory())
        if args.transformer_impl != "local":
            stack.enter_context(_as_transformer_engine())
        config, models = _models(args)
        yield TECudaGraphHelper(models, config, args.seq_length, args.micro_batch_size)


def blocker_of_pipeline(args: argparse.Namespace) -> str:
    """Return why some pipeline stage cannot be captured as a whole; empty if all can or there is no pipeline."""
    stages = args.pipeline_model_parallel_size
    for stage in range(stages if stages > 1 else 0):
        with quietly(), dry_stage(args, stage) as helper:
            found = blocker(helper.stage)
        if found:
            return found
    return ""


def _models(args: argparse.Namespace) -> tuple[Any, list[torch.nn.Module]]:
    given = copy.copy(args)
    for name, value in _NEEDS_A_GPU.items():
        setattr(given, name, value)
    model = hybrid_config_from_args(given) if is_hybrid_model(given) else gpt_config_from_args(given)
    ddp_config = get_megatron_ddp_config(args)
    ddp_config.nccl_ub = False  # its allocator needs a GPU, and buffers have the same size without it
    models = model.get_builder_cls()(model).build_distributed_models(
        ProcessGroupCollection.use_mpu_process_groups(),
        ddp_config=ddp_config,
        use_megatron_fsdp=args.use_megatron_fsdp,
        use_torch_fsdp2=args.use_torch_fsdp2,
        data_parallel_random_init=False,  # would communicate
    )
    model.transformer.transformer_impl = args.transformer_impl  # read by the flag checks
    return model.transformer, models


@contextlib.contextmanager
def _rank(args: argparse.Namespace, rank: int) -> Iterator[None]:
    """Make this process act as one rank of the job within the context."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
            create_gloo_process_groups=False,
        )
        num_microbatches_calculator.unset_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(
            rank, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
        )
        model_parallel_cuda_manual_seed(args.seed, use_cudagraphable_rng=True, force_reset_rng=True)
        yield
    finally:
        num_microbatches_calculator.unset_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Context manager that creates device tensors on the meta device, which allocates no memory."""
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(cpu_backend.device, "to_cpu", _to_meta)
        replace(torch.nn.Parameter, "is_meta", False)  # Megatron-FSDP initializes parameters on the meta device
        replace(torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type == "meta"))
        wrapper = mcore_fsdp_adapter.FullyShardedDataParallel
        replace(wrapper, "sync_rng_states_across_tp_group", lambda self: None)
        # These options avoid exchanging shard shapes with other ranks.
        unchecked = {"run_check": False, "update_uneven_dtensor_chunk_meta": False}
        make = param_and_grad_buffer.make_fsdp_dtensor
        replace(param_and_grad_buffer, "make_fsdp_dtensor", lambda *args, **kw: make(*args, **(kw | unchecked)))
        yield


def _to_meta(device: Any) -> Any:
    return torch.device("meta") if cpu_backend.device.is_cuda_device(device) else device


@contextlib.contextmanager
def _as_transformer_engine() -> Iterator[None]:
    """Within the context, make local layers support grouped experts, and context and sequence parallelism."""
    with (
        mock.patch.object(WrappedTorchNorm, "__new__", _norm),
        mock.patch.object(DotProductAttention, "__init__", _attention),
        mock.patch.object(SequentialMLP, "__init__", partialmethod(_experts, SequentialMLP.__init__)),
    ):
        yield


def _experts(self: SequentialMLP, build: Callable[..., None], count: int, *args: Any, **kwargs: Any) -> None:
    """Build one expert with the weights of all ``count`` experts, which take the same memory in one tensor."""
    build(self, 1, *args, **kwargs)
    self.num_local_experts = count
    for linear in (self.local_experts[0].linear_fc1, self.local_experts[0].linear_fc2):
        for param in linear.parameters():
            param.data = param.new_empty(count * len(param), *param.shape[1:])


def _attention(self: DotProductAttention, config: Any, *args: Any, **kwargs: Any) -> None:
    MegatronModule.__init__(self, config)


def _norm(wrapper: type, config: Any, hidden_size: int, *args: Any, **kwargs: Any) -> torch.nn.Module:
    kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    return kind(hidden_size)
