"""Options are read alike from flags as they were typed and from configurations."""

from types import SimpleNamespace

import pytest

from megatron.core.transformer._cuda_graphs.flags.options import Options
from megatron.core.transformer.enums import CudaGraphModule


def options(**values):
    return Options(SimpleNamespace(**values))


def test_the_first_source_with_a_value_counts():
    found = Options(SimpleNamespace(one=None, two=2), SimpleNamespace(one=1, two=3))
    assert (found.get("one"), found.get("two")) == (1, 2)


def test_an_option_of_no_source_is_not_given():
    assert options().get("fp16") is None
    assert options(fp16=None).get("fp16", "default") == "default"


def test_an_option_without_a_value_is_known():
    assert options(spec=None).knows("spec")
    assert not options().knows("spec")


@pytest.mark.parametrize(
    ("values", "implementation"),
    [
        ({}, "none"),
        ({"cuda_graph_impl": "transformer_engine"}, "transformer_engine"),
        ({"cuda_graph_impl": "none", "external_cuda_graph": True}, "transformer_engine"),
        ({"cuda_graph_impl": "none", "enable_cuda_graph": True}, "local"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope_deprecated": ["full_iteration"]}, "full_iteration"),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["full_iteration_inference"]}, "local"),
    ],
)
def test_deprecated_flags_choose_the_implementation_that_megatron_core_chooses(values, implementation):
    assert options(**values).implementation == implementation


@pytest.mark.parametrize(
    ("given", "modules"),
    [
        (None, set()),
        ([], set()),
        ("full", set()),
        (["full"], set()),
        ("", set()),
        ("attn,moe_router", {"attn", "moe_router"}),
        (CudaGraphModule.attn, {"attn"}),
        ([CudaGraphModule.attn, "mlp"], {"attn", "mlp"}),
    ],
)
def test_modules_may_be_given_as_megatron_core_takes_them(given, modules):
    assert options(cuda_graph_modules=given).modules == modules


def test_whole_layers_hold_every_part():
    assert options(cuda_graph_modules=[]).graphs("moe")
    assert not options(cuda_graph_modules=["attn"]).graphs("moe")


@pytest.mark.parametrize("name", ["fsdp_double_buffer", "nccl_ub", "megatron_fsdp_max_pool_double_buffer"])
def test_these_flags_mean_the_double_buffer(name):
    assert options(**{name: True}).double_buffer
    assert not options(**{name: False}).double_buffer


@pytest.mark.parametrize("name", ["num_experts", "num_moe_experts"])
def test_experts_have_two_names(name):
    assert options(**{name: 4}).has_experts
    assert not options(**{name: None}).has_experts


@pytest.mark.parametrize(("number", "experts"), [(None, False), (1, False), (2, True)])
def test_one_expert_is_none(number, experts):
    assert options(num_moe_experts=number).has_experts is experts


@pytest.mark.parametrize(("frequency", "dense"), [(1, False), (2, True), ([1, 1], False), ([0, 1], True)])
def test_the_frequency_of_experts_says_whether_layers_are_without(frequency, dense):
    assert options(num_moe_experts=4, moe_layer_freq=frequency).has_dense_layers is dense
    assert options(num_moe_experts=None, moe_layer_freq=frequency).has_dense_layers


def test_experts_are_padded_to_a_capacity_only():
    assert options(moe_pad_expert_input_to_capacity=True, moe_expert_capacity_factor=1.0).pads_experts
    assert not options(moe_pad_expert_input_to_capacity=True, moe_expert_capacity_factor=None).pads_experts
    assert not options(moe_pad_expert_input_to_capacity=False, moe_expert_capacity_factor=1.0).pads_experts


@pytest.mark.parametrize(
    "values",
    [
        {"num_layers_per_virtual_pipeline_stage": 1},
        {"num_virtual_stages_per_pipeline_rank": 2},
        {"virtual_pipeline_model_parallel_size": 2},
    ],
)
def test_stages_with_several_chunks(values):
    assert options(pipeline_model_parallel_size=2, **values).interleaves
    assert not options(pipeline_model_parallel_size=1, **values).interleaves
    assert not options(pipeline_model_parallel_size=2).interleaves


@pytest.mark.parametrize(
    ("values", "recomputed"),
    [
        ({}, False),
        ({"recompute_granularity": "full"}, False),
        ({"recompute_granularity": "selective"}, True),
        ({"recompute_activations": True, "recompute_granularity": None}, True),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, False),
    ],
)
def test_attention_is_recomputed_unless_other_modules_are_named(values, recomputed):
    assert options(**values).recomputes("core_attn") is recomputed
