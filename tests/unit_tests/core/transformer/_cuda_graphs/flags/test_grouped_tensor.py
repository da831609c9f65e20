"""What --moe-use-grouped-tensor does not fit is named before anything runs."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.transformer._cuda_graphs.errors import OptionsError
from megatron.core.transformer._cuda_graphs.flags.checks import check_grouped_tensor

UNFIT: dict[str, dict[str, Any]] = {
    "--num-experts": {"num_experts": None},
    "--moe-expert-capacity-factor": {"moe_expert_capacity_factor": 1.0},
    "--fp8-format": {"fp8": "hybrid"},
    "--fp4-format": {"fp4": "e2m1"},
    "--fp16": {"fp16": True},
    "--hidden-size": {"hidden_size": 60},
    "--moe-ffn-hidden-size": {"moe_ffn_hidden_size": 60},
    "--moe-latent-size": {"moe_latent_size": 60},
    "the kernels of flex": {"moe_token_dispatcher_type": "flex"},
    "--expert-tensor-parallel-size 1": {"tensor_model_parallel_size": 2},
    "--expert-tensor-parallel-size": {"expert_tensor_parallel_size": 2},
    "--delay-wgrad-compute": {"delay_wgrad_compute": True},
    "--overlap-moe-expert-parallel-comm": {"overlap_moe_expert_parallel_comm": True},
    "--overlap-dispatch-backward": {"overlap_dispatch_backward_with_experts_wgrad": True},
    "moe_act": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
    "--offload-modules": {"fine_grained_activation_offloading": True, "offload_modules": ["expert_fc1"]},
    "--use-transformer-engine-op-fuser": {"use_transformer_engine_op_fuser": True},
    "--moe-mlp-glu-interleave-size": {"moe_mlp_glu_interleave_size": 32},
    "--moe-single-grouped-weight": {"moe_single_grouped_weight": True},
    "--moe-single-grouped-bias": {"moe_single_grouped_bias": True},
    "inference_optimized": {"transformer_impl": "inference_optimized"},
    "--use-torch-fsdp2": {"use_torch_fsdp2": True},
    "--tensor-parallel-num-weight-shards": {"gtp_weight_remat_size": 2},
}
FIT: list[dict[str, Any]] = [
    {},
    {"hidden_size": 64, "moe_ffn_hidden_size": 128, "moe_latent_size": None},
    {"expert_model_parallel_size": 2},
    {"moe_token_dispatcher_type": "allgather", "expert_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]},
    {"fine_grained_activation_offloading": True, "offload_modules": ["attn_norm"]},
]


def options(**changes):
    fitting: dict[str, Any] = {
        "moe_use_grouped_tensor": True,
        "num_experts": 8,
        "moe_token_dispatcher_type": "alltoall",
    }
    return SimpleNamespace(**fitting | changes)


@pytest.mark.parametrize("words", UNFIT)
def test_what_does_not_fit_is_named(words):
    with pytest.raises(OptionsError) as error:
        check_grouped_tensor(options(**UNFIT[words]))
    (line,) = str(error.value).split("\n")
    assert line.startswith("--moe-use-grouped-tensor ")
    assert words in line


def test_all_that_does_not_fit_is_named_together():
    with pytest.raises(OptionsError) as error:
        check_grouped_tensor(options(fp8="hybrid", delay_wgrad_compute=True))
    assert len(str(error.value).split("\n")) == 2


@pytest.mark.parametrize("changes", FIT, ids=str)
def test_what_fits_passes(changes):
    check_grouped_tensor(options(**changes))


@pytest.mark.parametrize("words", UNFIT)
def test_without_the_flag_nothing_is_refused(words):
    check_grouped_tensor(options(moe_use_grouped_tensor=False, **UNFIT[words]))


FACTOR: dict[str, Any] = {"moe_alltoall_capacity_factor": 1.25, "expert_model_parallel_size": 2}
UNFIT_FOR_FACTOR: dict[str, dict[str, Any]] = {
    "needs --moe-use-grouped-tensor": {"moe_use_grouped_tensor": False},
    "--moe-token-dispatcher-type alltoall": {"moe_token_dispatcher_type": "allgather"},
    "--expert-model-parallel-size above 1": {"expert_model_parallel_size": 1},
    "--rerun-mode validate_results": {"rerun_mode": "disabled"},
    "--cuda-graph-impl local": {"cuda_graph_impl": "local"},
    "full_iteration": {"cuda_graph_impl": "full_iteration"},
    "--pipeline-model-parallel-size": {"pipeline_model_parallel_size": 2},
    "--fine-grained-activation-offloading": {"fine_grained_activation_offloading": True},
    "--qk-clip": {"qk_clip": True},
    "--log-max-attention-logit": {"log_max_attention_logit": True},
}


@pytest.mark.parametrize("words", UNFIT_FOR_FACTOR)
def test_what_a_capacity_factor_does_not_fit_is_named(words):
    with pytest.raises(OptionsError) as error:
        check_grouped_tensor(options(**FACTOR | UNFIT_FOR_FACTOR[words]))
    (line,) = str(error.value).split("\n")
    assert line.startswith("--moe-alltoall-capacity-factor ")
    assert words in line


@pytest.mark.parametrize("changes", [{}, {"cuda_graph_impl": "transformer_engine"}, {"rerun_mode": "validate_results"}])
def test_a_capacity_factor_fits_an_alltoall_of_several_ranks(changes):
    check_grouped_tensor(options(**FACTOR | changes))
