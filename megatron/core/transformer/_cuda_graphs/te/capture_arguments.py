"""Arguments of ``make_graphed_callables``: the order of passes, sample inputs, and options."""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.enums import CudaGraphModule

from ..engine.plan import Plan, ordered_plan
from ..engine.quantization import RecordedQuantization
from ..errors import ArgumentError
from .layers import mtp_layers
from .sample_inputs import LayerInputs, SampleArguments, attention_mask_type, sample_arguments
from .stage import Layers, Stage

# How often a layer runs before capture, including training: the same as in torch's make_graphed_callables. (The
# recommendation of ten or eleven is specific to torch's DistributedDataParallel.)
WARMUP_ITERATIONS = 3


@dataclass(frozen=True)
class PassOrder:
    """The passes of a pipeline stage in capture order.

    Attributes:
        order: As in ``make_graphed_callables``: ``c`` for the forward pass of model chunk ``c`` (1-based), ``-c`` for
            its backward pass, ``-c - 0.5`` for its delayed weight gradients.
        num_layers_per_chunk: The number of captured layers in each chunk of ``order``.
        chunk_id_list: If each chunk of ``order`` is one layer, 0-based ``[model chunk, layer]`` for each forward pass
            and None for every other pass; otherwise None.
    """

    order: list[float]
    num_layers_per_chunk: list[int]
    chunk_id_list: list[list[int] | None] | None = None

    @property
    def num_microbatches(self) -> int:
        """The number of forward passes of each chunk."""
        return self.order.count(1)

    @cached_property
    def plan(self) -> Plan:
        """The engine's plan, with the captured layers as callables."""
        return ordered_plan(self.order, self.num_layers_per_chunk, sum(self.num_layers_per_chunk))


def pass_order(stage: Stage, num_layers_per_chunk: list[int]) -> PassOrder:
    """Return the order of passes of ``stage``; ``num_layers_per_chunk`` is the number of callables of each chunk."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
    from megatron.core.transformer.cuda_graphs import (  # imports this module
        convert_schedule_table_to_order,
        get_overlap_moe_expert_parallel_comm_order,
    )

    config = stage.config
    num_chunks = len(stage.chunks)
    num_microbatches = 1 if stage.one_graph_serves_all else get_num_microbatches()
    group_size = config.microbatch_group_size_per_vp_stage
    _, _, num_warmup_microbatches, _ = get_pp_rank_microbatches(
        num_microbatches,
        num_chunks,
        group_size,
        forward_only=False,
        p2p_communicator=stage.p2p_communicator,
    )
    table = get_schedule_table(num_microbatches, num_chunks, group_size)
    chunks = convert_schedule_table_to_order(num_warmup_microbatches, num_chunks, table)
    passes = PassOrder([*chunks], num_layers_per_chunk)
    if config.overlap_moe_expert_parallel_comm:
        # Layers of two chunks interleave, so every layer becomes a separate chunk.
        every = [chunk.every_layer for chunk in stage.chunks]
        overlapped = get_overlap_moe_expert_parallel_comm_order(
            chunks, [len(own) for own in every], config.delay_wgrad_compute and _captures_weight_gradients(config)
        )
        order, chunk_id_list = captured_passes(overlapped, every, [chunk.layers for chunk in stage.chunks])
        passes = PassOrder(order, [1] * sum(num_layers_per_chunk), chunk_id_list)
    stage.log(logging.DEBUG, f"order of passes {passes.order}")
    return passes


def layer_samples(stage: Stage, plan: Plan, seq_length: int, micro_batch_size: int) -> list[SampleArguments]:
    """Create the positional and keyword inputs of every slot of ``plan``; see ``sample_inputs.sample_arguments``."""
    inputs = LayerInputs(stage.config, seq_length, micro_batch_size)
    layers = [(layer, chunk.model if stage.role.language else None) for chunk in stage.chunks for layer in chunk.layers]
    return sample_arguments(
        plan, lambda index: inputs.make(*layers[index]), lambda index: attention_mask_type(layers[index][0])
    )


def engine_arguments(
    stage: Stage, passes: PassOrder, sample_kwargs: Sequence[dict[str, torch.Tensor]]
) -> dict[str, Any]:
    """Return the keyword arguments of ``make_graphed_callables``, except hooks and gradient owners."""
    config = stage.config
    arguments = {
        "sample_kwargs": sample_kwargs,
        "allow_unused_input": True,
        "_order": passes.order,
        "_num_layers_per_chunk": passes.num_layers_per_chunk,
        "_reuse_graph_input_output_buffers": True,
        "retain_graph_in_backward": config.cuda_graph_retain_backward_graph,
        "num_warmup_iters": num_warmup_iterations(config, passes.num_microbatches),
    }
    if all(chunk.fsdp is not None and not _shares_parameters(chunk.fsdp) for chunk in stage.chunks):
        # Megatron-FSDP copies each gradient to its bucket before the next replay, unless autograd keeps it to
        # accumulate the gradient of a second module.
        arguments["clone_param_grads_on_return"] = False
    return arguments | quantization_arguments(stage, stage.layers)


def _shares_parameters(model: torch.nn.Module) -> bool:
    """Return whether modules of ``model`` share a parameter, so that autograd sums its gradients."""
    places = [param for _, param in model.named_parameters(remove_duplicate=False)]
    return len(places) > len(set(places))


def num_warmup_iterations(config: Any, num_microbatches: int) -> int:
    """Return how many warm-up iterations of ``num_microbatches`` passes are still needed after the eager steps."""
    done = config.cuda_graph_warmup_steps * get_num_microbatches()
    return max(1, math.ceil((WARMUP_ITERATIONS - done) / num_microbatches))


def quantization_arguments(stage: Stage, layers: Iterable[torch.nn.Module]) -> dict[str, Any]:
    """Return the engine's quantization arguments for ``layers`` of ``stage``."""
    config = stage.config
    if not (config.fp8 or config.fp4):
        return {"enabled": False}
    from megatron.core.fp4_utils import get_fp4_recipe
    from megatron.core.fp8_utils import get_fp8_recipe, is_first_last_bf16_layer

    mtp = {layer for chunk in stage.chunks for layer in mtp_layers(chunk.model)}
    return {
        "enabled": tuple(
            not is_first_last_bf16_layer(config, -1 if layer in mtp else layer.layer_number - 1) for layer in layers
        ),
        "recipe": get_fp8_recipe(config) if config.fp8 else get_fp4_recipe(config),
        # Cached FP8 weights would outlive Megatron-FSDP's all-gather buffers.
        "cache_quantized_params": not (config.fp8_param and any(chunk.fsdp for chunk in stage.chunks)),
        "amax_reduction_group": _amax_reduction_group(stage),
    }


def recorded_quantization(stage: Stage, module: torch.nn.Module) -> RecordedQuantization | None:
    """Return the quantization of ``module`` for whole-pass graphs; None without FP8."""
    config = stage.config
    if not config.fp8:
        return None
    from transformer_engine.pytorch.graph import FP8GlobalStateManager

    caches_params = not config.disable_parameter_transpose_cache
    return RecordedQuantization(FP8GlobalStateManager, module, config.fp8_recipe == "delayed", caches_params)


def _amax_reduction_group(stage: Stage) -> torch.distributed.ProcessGroup:
    """Return the amax reduction group of FP8 and FP4; raise ArgumentError if ``pg_collection`` lacks it."""
    name = "tp_cp" if stage.config.tp_only_amax_red else "tp_dp_cp"
    group = getattr(stage.groups, name, None)
    if group is None:
        raise ArgumentError(f"pg_collection lacks {name}, the process group for amax reduction of FP8 and FP4: add it")
    return group


def _captures_weight_gradients(config: Any) -> bool:
    modules = config.cuda_graph_modules
    shared_experts = config.moe_shared_expert_intermediate_size is not None and not config.moe_shared_expert_overlap
    return CudaGraphModule.attn in modules or (CudaGraphModule.moe_router in modules and shared_experts)


def captured_passes(
    passes: tuple[Sequence[float], Sequence[list[int] | None]], scheduled: Sequence[Layers], captured: Sequence[Layers]
) -> tuple[list[float], list[list[int] | None]]:
    """Restrict ``passes``, the order and ``chunk_id_list`` of all ``scheduled`` layers, to the ``captured`` ones."""
    layers = [layer for own in scheduled for layer in own]
    numbers = {layer: number for number, layer in enumerate((layer for own in captured for layer in own), 1)}
    steps: list[float] = []
    places: list[list[int] | None] = []
    for step, place in zip(*passes, strict=True):
        old = int(abs(step))
        layer = layers[old - 1]
        if new := numbers.get(layer):
            steps.append(step + (new - old if step > 0 else old - new))
            places.append(place and [place[0], captured[place[0]].index(layer)])
    return steps, places
