"""What is captured, in which order, with which inputs: the arguments of ``make_graphed_callables``."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import CudaGraphModule

from ..engine.plan import ordered_plan
from ..errors import ArgumentError
from .backends import Backend
from .capture_mode import offload_interface
from .layers import fsdp_of
from .order import PassOrder, convert_schedule_table_to_order, get_overlap_moe_expert_parallel_comm_order
from .sample_inputs import LayerInputs, SampleArguments, attention_mask_type, sample_arguments

# Iterations that a layer should have had before it is captured, training steps included: as many as torch's own
# make_graphed_callables runs. (The ten or eleven that are asked for elsewhere are for torch's DistributedDataParallel.)
_WARMUP_ITERATIONS = 3


class MakesArguments:
    """The part of ``TECudaGraphHelper`` that makes the arguments of a capture of layers."""

    model: Sequence[torch.nn.Module]
    config: Any
    seq_length: int
    micro_batch_size: int
    pg_collection: ProcessGroupCollection
    pp_group: torch.distributed.ProcessGroup
    p2p_communicator: Any
    num_model_chunks: int
    num_microbatches: int | None
    chunks_with_decoder: Sequence[torch.nn.Module | None]
    callables_per_chunk: Sequence[Sequence[torch.nn.Module]]
    num_layers_per_chunk: list[int]
    flattened_callables: Sequence[torch.nn.Module]
    flattened_callables_is_mtp: Sequence[bool]
    _engine: Backend
    _log: Callable[[int, str], None]
    _in_decoder: frozenset[torch.nn.Module] = frozenset()  # layers that are captured as one
    _layers_of: Callable[[torch.nn.Module], tuple[Any, list[tuple[torch.nn.Module, bool]]]]

    @property
    def _layers_apart(self) -> list[list[torch.nn.Module]]:
        """The layers of each chunk that have graphs of their own."""
        return [[layer for layer in own if layer not in self._in_decoder] for own in self.callables_per_chunk]

    def _get_sample_arguments(
        self, order: Sequence[float], chunk_id_list: list | None = None
    ) -> tuple[list[tuple[torch.Tensor, ...]], list[dict[str, torch.Tensor]]]:
        """Make the static inputs of each layer and micro-batch; see ``sample_inputs.sample_arguments``.

        Args:
            order: The order of passes over model chunks, or over layers if there is a ``chunk_id_list``.
            chunk_id_list: For each forward pass of ``order`` its ``[model chunk, layer of the chunk]``, counted from 0.

        Returns:
            Positional inputs and keyword inputs, by chunk of ``order``, then micro-batch, then layer.
        """
        samples = self._samples(order, chunk_id_list)
        return [args for args, _ in samples], [kwargs for _, kwargs in samples]

    def _samples(self, order: Sequence[float], chunk_id_list: list | None = None) -> list[SampleArguments]:
        inputs = LayerInputs(self.config, self.seq_length, self.micro_batch_size)
        per_chunk = self.num_layers_per_chunk
        apart = self._layers_apart
        places = [(chunk, i) for chunk, layers in enumerate(apart) for i in range(len(layers))]
        if chunk_id_list is not None:
            per_chunk = [1] * len(places)
            for step, place in zip(order, chunk_id_list, strict=True):
                if place is not None:
                    places[int(step) - 1] = tuple(place)
        models = [self.chunks_with_decoder[chunk] for chunk, _ in places]
        layers = [apart[chunk][i] for chunk, i in places]
        plan = ordered_plan(order, per_chunk, len(layers))
        return sample_arguments(
            plan,
            lambda index: self._inputs_of_layer(inputs, layers[index], models[index]),
            lambda index: attention_mask_type(layers[index]),
        )

    def _inputs_of_layer(self, inputs: LayerInputs, layer: torch.nn.Module, model: Any) -> SampleArguments:
        return inputs.make(layer, model)

    def _decoder_inputs(self, model: Any) -> tuple[dict[str, torch.Tensor], list[tuple[str, ...]]]:
        """Make static inputs, by keyword, for all layers of the decoder of ``model``; and which each of them reads."""
        make = LayerInputs(self.config, self.seq_length, self.micro_batch_size)
        inputs: dict[str, torch.Tensor] = {}
        read: list[tuple[str, ...]] = []
        for layer in model.decoder.layers:
            (hidden_states,), keywords = self._inputs_of_layer(make, layer, model)
            inputs = {"hidden_states": hidden_states, **keywords} | inputs
            read.append(tuple(keywords))
        return inputs, read

    def _get_cuda_graph_input_data(self) -> tuple[list[tuple[torch.Tensor, ...]], dict[str, Any]]:
        """Return the positional inputs and the keyword arguments of ``make_graphed_callables``."""
        passes = self._order()
        self.num_layers_per_chunk, self.num_model_chunks = passes.num_layers_per_chunk, len(passes.num_layers_per_chunk)
        self.num_microbatches = passes.num_microbatches
        sample_args, sample_kwargs = self._get_sample_arguments(passes.order, passes.chunk_id_list)
        arguments = {
            "sample_kwargs": sample_kwargs,
            "allow_unused_input": True,
            "_order": passes.order,
            "_num_layers_per_chunk": self.num_layers_per_chunk,
            "_reuse_graph_input_output_buffers": True,
            "retain_graph_in_backward": self.config.cuda_graph_retain_backward_graph,
            "num_warmup_iters": self._num_warmup_iterations(),
        }
        if all(fsdp_of(chunk) is not None for chunk in self.model):
            # Megatron-FSDP copies each gradient to its bucket as soon as it is complete, before any other replay.
            arguments["clone_param_grads_on_return"] = False
        quantization = self._quantization_arguments()
        missing = [name for name in quantization if name not in self._engine.parameters]
        if missing and quantization["enabled"]:
            raise RuntimeError(
                "--fp8-format and --fp4-format need TransformerEngine 2.19 or newer: its engine knows no "
                f"{missing[0]!r}"
            )
        arguments |= quantization
        if self.config.fine_grained_activation_offloading:
            offload = offload_interface()
            arguments["pre_warmup_hook"] = offload.disable_offload
            arguments["post_warmup_hook"] = offload.enable_offload
        return sample_args, {name: value for name, value in arguments.items() if name in self._engine.parameters}

    def _gradient_sinks(self) -> dict[str, list[Any]]:
        """Return the keyword argument by which Megatron-FSDP takes the gradients of layers that it is capturing."""
        if "gradient_sinks" not in self._engine.parameters or not all(map(fsdp_of, self.model)):
            return {}
        whole = not self.config.cuda_graph_modules
        sinks: list[Any] = []
        for chunk, layers in zip(self.model, self._layers_apart, strict=True):
            fsdp: Any = fsdp_of(chunk)
            sinks += fsdp.gradient_sinks(layers, whole)
        return {"gradient_sinks": sinks}

    def _order(self) -> PassOrder:
        """The order of forward and backward passes of this pipeline stage."""
        from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

        num_chunks = len(self.model)
        num_microbatches = 1 if self._one_graph_serves_all() else get_num_microbatches()
        group_size = self.config.microbatch_group_size_per_vp_stage
        _, _, num_warmup_microbatches, _ = get_pp_rank_microbatches(
            num_microbatches,
            num_chunks,
            group_size,
            forward_only=False,
            p2p_communicator=self.p2p_communicator,
        )
        table = get_schedule_table(num_microbatches, num_chunks, group_size)
        chunks = convert_schedule_table_to_order(num_warmup_microbatches, num_chunks, table)
        num_layers = [len(layers) for layers in self._layers_apart]
        passes = PassOrder([*chunks], num_layers, num_microbatches)
        if self.config.overlap_moe_expert_parallel_comm:
            # Layers of two chunks interleave: every layer becomes a chunk of its own.
            order, chunk_id_list = get_overlap_moe_expert_parallel_comm_order(
                chunks,
                num_layers,
                self.config.delay_wgrad_compute and self._captures_weight_gradients(),
                list(map(self._places, self.model, self._layers_apart)),
            )
            passes = PassOrder(order, [1] * sum(num_layers), order.count(1), chunk_id_list)
        self._log(logging.DEBUG, f"order of passes {passes.order}")
        return passes

    def _places(self, chunk: torch.nn.Module, captured: Sequence[torch.nn.Module]) -> list[int | None]:
        """Return for each layer of ``chunk`` its place among those that are ``captured``, or None."""
        place = {layer: index for index, layer in enumerate(captured)}
        return [place.get(layer) for layer, _ in self._layers_of(chunk)[1]]

    def _one_graph_serves_all(self) -> bool:
        """Whether only one micro-batch is in flight at a time, as without pipeline stages."""
        return self.pp_group.size() == 1 and not self.config.overlap_moe_expert_parallel_comm

    def _captures_weight_gradients(self) -> bool:
        modules, config = self.config.cuda_graph_modules, self.config
        shared_experts = config.moe_shared_expert_intermediate_size is not None and not config.moe_shared_expert_overlap
        return CudaGraphModule.attn in modules or (CudaGraphModule.moe_router in modules and shared_experts)

    def _num_warmup_iterations(self) -> int:
        done = self.config.cuda_graph_warmup_steps * get_num_microbatches()
        return max(1, math.ceil((_WARMUP_ITERATIONS - done) / (self.num_microbatches or 1)))

    def _quantization_arguments(self) -> dict[str, Any]:
        config = self.config
        if not (config.fp8 or config.fp4):
            return {"enabled": False}
        from megatron.core.fp4_utils import get_fp4_recipe
        from megatron.core.fp8_utils import get_fp8_recipe, is_first_last_bf16_layer

        layers = zip(self.flattened_callables, self.flattened_callables_is_mtp, strict=True)
        return {
            "enabled": tuple(
                not is_first_last_bf16_layer(config, -1 if mtp else layer.layer_number - 1) for layer, mtp in layers
            ),
            "recipe": get_fp8_recipe(config) if config.fp8 else get_fp4_recipe(config),
            # Cached copies of FP8 weights would outlive the buffers that Megatron-FSDP gathers them to.
            "cache_quantized_params": not (config.fp8_param and any(fsdp_of(chunk) for chunk in self.model)),
            "amax_reduction_group": self._get_amax_reduction_group(
                with_context_parallel=True, tp_only_amax_red=config.tp_only_amax_red
            ),
        }

    def _get_amax_reduction_group(
        self, with_context_parallel: bool = False, tp_only_amax_red: bool = False
    ) -> torch.distributed.ProcessGroup:
        """Return the process group over which FP8 and FP4 reduce amaxes (largest absolute values).

        Args:
            with_context_parallel: Whether the group includes context-parallel ranks.
            tp_only_amax_red: Whether the group excludes data-parallel ranks.

        Raises:
            ArgumentError: ``pg_collection`` has no such group.
        """
        name = "tp" + ("" if tp_only_amax_red else "_dp") + ("_cp" if with_context_parallel else "")
        group = getattr(self.pg_collection, name, None)
        if group is None:
            raise ArgumentError(
                f"quantization reduces over the process group {name}, which pg_collection does not have"
            )
        return group
