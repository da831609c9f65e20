"""The model of a case: its configuration, a GPT and what wraps it, and its optimizer."""

from ast import literal_eval
from typing import Any

import torch

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


def transformer_config(case: Case, graphs: bool):
    """The ``TransformerConfig`` of ``case``; with ``graphs`` its layers are to be captured."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    moe: dict[str, Any] = {}
    if case.experts:
        moe = {
            "num_moe_experts": case.experts,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": case.dispatcher,
            "moe_ffn_hidden_size": case.hidden * 2,
            "moe_aux_loss_coeff": 1e-2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_layer_freq": list(case.moe_layer_freq) if isinstance(case.moe_layer_freq, tuple) else 1,
            "moe_shared_expert_intermediate_size": case.shared_experts or None,
            "moe_shared_expert_overlap": case.shared_overlap,
            "overlap_moe_expert_parallel_comm": case.ep_overlap,
            "delay_wgrad_compute": case.delay_wgrad,
            "moe_expert_capacity_factor": case.capacity,
            "moe_pad_expert_input_to_capacity": case.capacity is not None,
            "add_bias_linear": False,
        }
        if case.transformer_engine:
            moe["moe_grouped_gemm"] = True
    if case.fp8:
        moe |= {"fp8": "hybrid", "fp8_recipe": case.fp8, "fp8_param": case.fp8_params}
    if case.recompute:
        moe |= {"recompute_granularity": "selective", "recompute_modules": list(case.recompute)}
        # A recomputed MLP would return its bias, a parameter, which becomes an output of its own recomputation.
        moe["add_bias_linear"] = "mlp" not in case.recompute and not case.experts
    from megatron.core import parallel_state

    kind: Any = TransformerConfig
    if case.latent_attention:
        kind = MLATransformerConfig
        ranks = {"q_lora_rank": case.hidden // 4, "kv_lora_rank": case.hidden // 4}
        moe |= ranks | {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "rope_type": "rope"}
    if case.positions == "mrope":
        half = case.hidden // case.heads // 2
        moe["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    if case.unbalanced:
        moe |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    moe |= {name: literal_eval(value) for name, _, value in (given.partition("=") for given in case.config)}
    config = kind(
        num_layers=case.layers,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        ffn_hidden_size=case.hidden * 4,
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        bf16=case.dtype == "bf16",
        fp16=case.dtype == "fp16",
        params_dtype=case.torch_dtype,
        pipeline_dtype=case.torch_dtype,
        cuda_graph_impl=("local" if case.local else "transformer_engine") if graphs else "none",
        cuda_graph_modules=list(case.modules) if graphs else [],
        cuda_graph_warmup_steps=case.warmup,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=case.virtual,
        overlap_p2p_comm=case.virtual is not None,
        batch_p2p_comm=case.virtual is None,
        deallocate_pipeline_outputs=True,
        sequence_parallel=case.sequence_parallel,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        mtp_num_layers=case.mtp or None,
        is_hybrid_model=bool(case.pattern),
        gradient_accumulation_fusion=case.fused_wgrad,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=case.packed > 0 and case.transformer_engine,
        deterministic_mode=False,
        **moe,
    )
    config.moe_use_grouped_tensor = case.grouped_tensor
    config.cuda_graph_max_captures = case.max_captures
    config.cuda_graph_layers_per_graph = case.cuda_graph_layers_per_graph
    if case.positions == "yarn":
        vars(config).update(YARN)  # megatron.training sets them as attributes too
    config.cuda_graph_packed_sequences = case.packed or None
    return config


def gpt_layer_spec(case: Case):
    """The spec of a GPT's layers, all of one kind."""
    from megatron.core.models.gpt import gpt_layer_specs

    if not case.transformer_engine:
        return gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=case.experts or None,
            moe_grouped_gemm=False,
            multi_latent_attention=case.latent_attention,
        )
    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=case.experts or None,
        moe_grouped_gemm=bool(case.experts),
        multi_latent_attention=case.latent_attention,
    )


def gpt(case: Case, config, virtual_stage: int | None = None):
    """The GPT of ``case``, or the chunk of it that a virtual pipeline stage has."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    spec = gpt_layer_spec(case)
    if isinstance(case.moe_layer_freq, tuple):
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=case.transformer_engine)
    if case.packed and not case.transformer_engine:
        from tests.support.layers.packed_attention import with_packed_attention

        spec = with_packed_attention(spec)
    elif config.context_parallel_size > 1 and not case.transformer_engine:
        from tests.support.layers.gathering_attention import with_gathering_attention

        spec = with_gathering_attention(spec)
    if case.local and "moe_router" in case.modules and config.cuda_graph_impl == "local":
        from megatron.core.transformer.transformer_layer import MoETransformerLayer

        spec.module = MoETransformerLayer  # the same layer, in parts that local graphs can hold
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
    return model


def under_fsdp(case: Case, config, model):
    """``model`` on the device, under Megatron-FSDP."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    options = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=case.strategy,
        num_distributed_optimizer_instances=case.instances,
        outer_dp_sharding_strategy=case.outer,
        overlap_grad_reduce=True,
        overlap_param_gather=case.overlap_param_gather,
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=False,
        gradient_reduce_div_fusion=False,
        fp8_param_gather=case.fp8_params,
        nccl_ub=case.nccl_ub,
        average_in_collective=case.averaged,
        fsdp_double_buffer=case.double_buffer,
        fsdp_db_use_persist_buf_on_alloc_fail=case.double_buffer,
        megatron_fsdp_max_pool_double_buffer=case.max_pool,
        megatron_fsdp_cuda_graph_mode=config.cuda_graph_impl != "none",
    )
    return FullyShardedDataParallel(config, options, _on_device(case, config, model))


def under_ddp(case: Case, config, model):
    """``model`` on the device, under DistributedDataParallel."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=case.overlap_param_gather,
        align_param_gather=case.virtual is not None,
        grad_reduce_in_fp32=True,
        bucket_size=case.bucket,
        average_in_collective=case.averaged,
    )
    return DistributedDataParallel(config, options, _on_device(case, config, model))


def under_torch_fsdp(case: Case, config, model):
    """``model`` on the device, under torch's FSDP2."""
    from megatron.core.distributed import TorchFullyShardedDataParallel
    from megatron.core.distributed.torch_fully_sharded_data_parallel_config import (
        TorchFullyShardedDataParallelConfig,
    )

    if not case.transformer_engine:
        config.transformer_impl = "local"  # whose linear layers are not sharded by themselves
    options = TorchFullyShardedDataParallelConfig(reshard_after_forward=case.reshard)
    return TorchFullyShardedDataParallel(config, options, _on_device(case, config, model))


def _on_device(case: Case, config, model):
    from megatron.core.transformer.module import Float16Module

    model = model.cuda()
    return model if case.dtype == "fp32" else Float16Module(config, model)


def optimizer(case: Case, chunks: list[torch.nn.Module], **options: Any):
    """The optimizer of wrapped model chunks; ``options`` are those of ``get_megatron_optimizer``."""
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
        use_distributed_optimizer=not case.torch_fsdp,
        optimizer_cuda_graph=case.optimizer_graph,
    )
    return get_megatron_optimizer(config, chunks, **options)
