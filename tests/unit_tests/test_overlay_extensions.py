"""What this tree's files replace in the modules of megatron-core that they extend."""

import importlib
import os

import pytest

pytest.importorskip("megatron.core")

from megatron_fsdp_cuda_graphs import overlay

FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
REPLACED = {
    "megatron.core.datasets.utils": {"compile_helpers"},
    "megatron.core.distributed.finalize_model_grads": {
        "_allreduce_embedding_grad",
        "_allreduce_replicated_grads_over_gtp_remat_group",
        "reset_model_temporary_tensors",
    },
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter": {
        "FullyShardedDataParallel",
        "_get_dp_tp_mesh",
        "_get_hsdp_tp_mesh",
    },
    f"{FSDP}.mixed_precision": {"fp8_quantize"},
    f"{FSDP}.megatron_fsdp": {"MegatronFSDP", "RegisterFSDPBackwardFunction", "TrainingState"},
    f"{FSDP}.param_and_grad_buffer": {
        "AllGatherPipeline",
        "DataParallelBuffer",
        "FixedPoolAllocator",
        "GradReducePipeline",
        "MaxPoolAllocator",
        "ParamAndGradBuffer",
        "StorageResizeBasedBucketAllocator",
        "_create_hfsdp_helper_buffer",
        "gradient_reduce_preprocessing",
        "make_fsdp_dtensor",
    },
    "megatron.core.fp8_utils": {"quantize_param_shard"},
    "megatron.core.fusions.fused_mla_yarn_rope_apply": {
        "rotary_bwd_kv_kernel",
        "rotary_bwd_q_kernel",
        "rotary_fwd_kv_kernel",
        "rotary_fwd_q_kernel",
    },
    "megatron.core.models.common.embeddings.rope_utils": {"get_pos_emb_on_this_cp_rank"},
    "megatron.core.optimizer.distrib_optimizer": {"DistributedOptimizer"},
    "megatron.core.optimizer.optimizer_cuda_graph": {"OptimizerCudaGraphWrapper"},
    "megatron.core.packed_seq_params": set(),
    "megatron.core.rerun_state_machine": {"RerunStateMachine"},
    "megatron.core.transformer.dot_product_attention": {"DotProductAttention"},
    "megatron.core.transformer.module": {"GraphableMegatronModule"},
    "megatron.core.transformer.multi_token_prediction": {
        "MTPLossAutoScaler",
        "MTPLossLoggingHelper",
        "_roll_tensor_packed_seq",
    },
    "megatron.core.transformer.transformer_config": {"MLATransformerConfig", "TransformerConfig"},
    "megatron.core.utils": {"get_batch_on_this_tp_rank"},
    "megatron.training.argument_utils": {"core_transformer_config_from_args"},
    "megatron.core.pipeline_parallel.schedules": {"backward_step"},
    "megatron.core.transformer.moe.router": {"TopKRouter"},
    "megatron.core.transformer.moe.experts": {"SequentialMLP", "TEGroupedMLP"},
    "megatron.core.transformer.moe.token_dispatcher": {"MoEAllGatherTokenDispatcher", "MoEAlltoAllTokenDispatcher"},
    "megatron.core.transformer.moe.shared_experts": {"FusedSharedExpertMLP", "SharedExpertMLP"},
    "megatron.training.arguments": {"add_megatron_arguments", "_parse_cuda_graph_modules_arg", "validate_args"},
    "megatron.training.checkpointing": {
        "_load_base_checkpoint",
        "generate_state_dict",
        "get_rng_state",
        "preprocess_fsdp_dtensor_state_dict",
    },
    "megatron.training.training": {"training_log"},
    "megatron.training.utils.common_utils": {
        "logical_and_across_model_parallel_group",
        "reduce_max_stat_across_model_parallel_group",
    },
}


def test_the_version_that_was_asked_for_is_tested():
    asked = os.environ.get("CORE_VERSION")
    core = overlay.find_core()
    assert core is not None and core.version in ((asked,) if asked else overlay.TESTED_VERSIONS)


def test_these_modules_are_extended():
    assert {name for name in overlay.patched_modules() if overlay.change(name) == "extended"} == {*REPLACED}


def test_one_module_is_replaced_and_the_others_are_added():
    changes = {name: overlay.change(name) for name in overlay.patched_modules()}
    assert [name for name, change in changes.items() if change == "replaced"] == [
        "megatron.core.transformer.cuda_graphs"
    ]


@pytest.mark.parametrize("name", REPLACED)
def test_these_names_are_defined_anew_and_none_by_accident(name):
    assert vars(overlay.upstream(name)).keys() == REPLACED[name]


@pytest.mark.parametrize("name", REPLACED)
def test_megatron_cores_file_is_the_modules(name):
    module = importlib.import_module(name)
    assert module.__file__ != str(overlay.tree_file(name))
    assert overlay.is_patched(module)
