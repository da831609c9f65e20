"""Build the configuration, model, wrapper and optimizer of a case."""

import re
from dataclasses import fields
from typing import Any

import torch

from tests.support.layers.adapters import add_adapters
from tests.support.layers.small_transformer_engine import quantize_linear_layers
from tests.support.trainings.case import VOCABULARY, Case

YARN = {
    "yarn_rotary_scaling_factor": 2.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}


# Attributes that the patch reads and `TransformerConfig` does not declare
PATCHED = ("moe_use_grouped_tensor",)
# Options of the optimizer
OTHERS = ("decoupled_lr",)
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def transformer_config(case: Case, graphs: bool):
    """Return the ``TransformerConfig`` of ``case``, with or without graphs.

    Raises:
        ValueError: An entry of ``case.config`` is not an attribute of any configuration.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    given = {name: list(value) if isinstance(value, tuple) else value for name, value in case.config}
    if unknown := given.keys() - _names_of_transformers() - _names_of_sharding() - {*PATCHED, *OTHERS}:
        raise ValueError(f"unknown attributes of the configuration: {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {
        "num_layers": case.layers,
        "hidden_size": case.hidden,
        "num_attention_heads": 4,
        "ffn_hidden_size": case.hidden * 4,
        "hidden_dropout": case.dropout,
        "attention_dropout": case.dropout,
        "bf16": case.dtype == "bf16",
        "fp16": case.dtype == "fp16",
        "params_dtype": case.torch_dtype,
        "pipeline_dtype": case.torch_dtype,
        "cuda_graph_impl": case.implementation if graphs else "none",
        "cuda_graph_modules": list(case.modules) if graphs else [],
        "cuda_graph_warmup_steps": case.warmup,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": case.virtual,
        "overlap_p2p_comm": case.virtual is not None,
        "batch_p2p_comm": case.virtual is None,
        "deallocate_pipeline_outputs": True,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "mtp_num_layers": case.mtp or None,
        "is_hybrid_model": bool(case.pattern),
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": case.packed > 0 and case.transformer_engine,
    }
    if case.experts:
        values |= {
            "num_moe_experts": case.experts,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_ffn_hidden_size": case.hidden * 2,
            "moe_aux_loss_coeff": 1e-2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_grouped_gemm": case.transformer_engine,
            "moe_pad_expert_input_to_capacity": "moe_expert_capacity_factor" in given,
            "add_bias_linear": False,
        }
    if case.unbalanced:
        values |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    if case.fp8:
        values |= {"fp8": "hybrid", "fp8_recipe": case.fp8}
    if "recompute_modules" in given:
        # A recomputed MLP would return its bias, a parameter, as an output of the recomputation.
        biased = "mlp" not in given["recompute_modules"] and not case.experts
        values |= {"recompute_granularity": "selective", "add_bias_linear": biased}
    kind: Any = TransformerConfig
    if given.get("multi_latent_attention"):
        kind = MLATransformerConfig
        values |= {"q_lora_rank": case.hidden // 4, "kv_lora_rank": case.hidden // 4, "rope_type": "rope"}
        values |= {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    if case.positions == "mrope":
        half = case.hidden // 4 // 2
        values["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    config = kind(**values | {name: value for name, value in given.items() if name in _names_of_transformers()})
    vars(config).update({name: given[name] for name in PATCHED if name in given})
    if case.positions == "yarn":
        vars(config).update(YARN)  # megatron.training sets these as attributes, not as fields
    config.cuda_graph_layers_per_graph = case.cuda_graph_layers_per_graph
    config.cuda_graph_packed_sequences = case.packed or None
    return config


def _names_of_transformers() -> set[str]:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return {each.name for each in fields(MLATransformerConfig)}


def _names_of_sharding() -> set[str]:
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig

    return {each.name for each in fields(DistributedDataParallelConfig)}


def gpt_layer_spec(case: Case):
    """Return the layer spec of a GPT with layers of a single kind."""
    from megatron.core.models.gpt import gpt_layer_specs

    if not case.transformer_engine:
        return gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=case.experts or None,
            moe_grouped_gemm=False,
            multi_latent_attention=case.get("multi_latent_attention", False),
        )
    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=case.experts or None,
        moe_grouped_gemm=bool(case.experts),
        multi_latent_attention=case.get("multi_latent_attention", False),
    )


def gpt(case: Case, config, virtual_stage: int | None = None):
    """Return the GPT of ``case``, or its model chunk for a virtual pipeline stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    spec = gpt_layer_spec(case)
    if "moe_layer_freq" in dict(case.config):
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=case.transformer_engine)
    if case.packed and not case.transformer_engine:
        from tests.support.layers.packed_attention import with_packed_attention

        spec = with_packed_attention(spec)
    elif config.context_parallel_size > 1 and not case.transformer_engine:
        from tests.support.layers.gathering_attention import with_gathering_attention

        spec = with_gathering_attention(spec)
    if case.local and "moe_router" in case.modules and config.cuda_graph_impl == "local":
        from megatron.core.transformer.transformer_layer import MoETransformerLayer

        spec.module = MoETransformerLayer  # the same layer, in parts that local graphs can capture
    mtp = None
    if case.mtp:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=case.transformer_engine, vp_stage=virtual_stage
        )
    model = GPTModel(
        config,
        spec,
        VOCABULARY,
        case.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage),
        position_embedding_type=case.positions,
        share_embeddings_and_output_weights=case.tied,
        vp_stage=virtual_stage,
        mtp_block_spec=mtp,
    )
    for module in model.modules() if case.unbalanced else ():
        if getattr(module, "expert_bias", None) is not None:
            module.expert_bias.copy_(-10.0 * torch.arange(case.experts))
    if case.fp8 and not case.transformer_engine:
        quantize_linear_layers(model)
    if case.adapters:
        add_adapters(model, case.adapters)
    for param in parameters_of(model, case.frozen):
        param.requires_grad_(False)
    return model


def parameters_of(model: torch.nn.Module, names: str) -> list[torch.nn.Parameter]:
    """Return the parameters whose names contain a match of the regular expression ``names``; none if it is empty."""
    return [param for name, param in model.named_parameters() if names and re.search(names, name)]


def wrapped(case: Case, config, model):
    """Return ``model`` on the device, in the wrapper of ``case``."""
    from megatron.core import distributed
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    model = model.cuda()
    if case.dtype != "fp32":
        from megatron.core.transformer.module import Float16Module

        model = Float16Module(config, model)
    values: dict[str, Any] = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "grad_reduce_in_fp32": True,
    }
    if case.wrapper == "ddp":
        # Small enough for several buckets.
        values |= {"align_param_gather": case.virtual is not None, "bucket_size": 10_000}
    else:
        values |= {
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "gradient_reduce_div_fusion": False,
            "fp8_param_gather": case.get("fp8_param", False),
            "fsdp_double_buffer": True,
            "fsdp_db_use_persist_buf_on_alloc_fail": case.get("fsdp_double_buffer", True),
            "megatron_fsdp_cuda_graph_mode": config.cuda_graph_impl != "none",
            "fsdp_all_gather_in_start_param_sync": config.cuda_graph_impl != "full_iteration",
        }
    values |= {name: value for name, value in case.config if name in _names_of_sharding()}
    wrapper = distributed.DistributedDataParallel if case.wrapper == "ddp" else FullyShardedDataParallel
    return wrapper(config, distributed.DistributedDataParallelConfig(**values), model)


def optimizer(case: Case, chunks: list[torch.nn.Module], **options: Any):
    """Return the optimizer of wrapped chunks; ``options`` are passed to ``get_megatron_optimizer``."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=case.dtype == "bf16",
        fp16=case.dtype == "fp16",
        initial_loss_scale=2.0**18,
        loss_scale_window=3,
        hysteresis=1,
        params_dtype=case.torch_dtype,
        use_distributed_optimizer=True,
        decoupled_lr=case.get("decoupled_lr"),
    )
    return get_megatron_optimizer(config, chunks, **options)
