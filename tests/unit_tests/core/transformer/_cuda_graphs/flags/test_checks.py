"""What Megatron-FSDP must be told for per-layer graphs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.transformer._cuda_graphs.flags.checks import check_fsdp_options, refuse_fsdp_hooks
from megatron.core.transformer._cuda_graphs.flags.table import TABLE
from megatron.core.transformer._cuda_graphs.hooks import BACKWARD_HANDLER, BACKWARD_PRE_HANDLER, runs_outside_graphs
from megatron.core.transformer.enums import CudaGraphModule


def options(**changes):
    """Options that fit, but for ``changes``."""
    fitting = {
        "fsdp_double_buffer": True,
        "fsdp_db_use_persist_buf_on_alloc_fail": True,
        "data_parallel_sharding_strategy": "optim_grads_params",
    }
    return SimpleNamespace(**{**fitting, **changes})


def config(impl="transformer_engine", fusion=False):
    """A model's configuration, as far as the check reads it."""
    return SimpleNamespace(cuda_graph_impl=impl, cuda_graph_modules=[], gradient_accumulation_fusion=fusion)


DOUBLE_BUFFER = "- --fsdp-double-buffer is required: "
PERSISTENT_FALLBACK = "- --fsdp-db-use-persist-buf-on-alloc-fail is required: "


def refusal(impl="transformer_engine", *, fusion=False, **changes):
    """The lines of the error."""
    with pytest.raises(ValueError) as error:
        check_fsdp_options(config(impl, fusion), options(**changes))
    return str(error.value).split("\n")


def test_options_that_fit_pass():
    check_fsdp_options(config(fusion=True), options())


@pytest.mark.parametrize("impl", ["none", "full_iteration"])
def test_graphs_that_are_not_per_layer_need_nothing(impl):
    unfit = options(
        fsdp_double_buffer=False,
        fsdp_db_use_persist_buf_on_alloc_fail=False,
        data_parallel_sharding_strategy="optim",
    )
    check_fsdp_options(config(impl, fusion=True), unfit)


def test_the_error_says_what_combination_it_is_about():
    assert refusal(fsdp_double_buffer=False)[0] == "--use-megatron-fsdp with --cuda-graph-impl transformer_engine:"


def test_a_missing_double_buffer_is_named_with_the_reason():
    (line,) = refusal(fsdp_double_buffer=False)[1:]
    assert line.startswith(DOUBLE_BUFFER)
    assert "another address" in line


def test_a_missing_persistent_fallback_is_named_with_the_reason():
    (line,) = refusal(fsdp_db_use_persist_buf_on_alloc_fail=False)[1:]
    assert line.startswith(PERSISTENT_FALLBACK)
    assert "illegal memory access" in line


def test_all_that_is_missing_is_named_at_once():
    first, second = refusal(fsdp_double_buffer=False, fsdp_db_use_persist_buf_on_alloc_fail=False)[1:]
    assert first.startswith(DOUBLE_BUFFER)
    assert second.startswith(PERSISTENT_FALLBACK)


def test_local_graphs_are_refused_with_the_ones_to_use():
    (line,) = refusal("local")[1:]
    assert line.startswith("- --cuda-graph-impl local runs no FSDP hooks")
    assert line.endswith("use --cuda-graph-impl transformer_engine")


def test_local_graphs_need_the_flags_too():
    lines = refusal("local", fsdp_double_buffer=False, fsdp_db_use_persist_buf_on_alloc_fail=False)[1:]
    assert [line.split(" is ")[0] for line in lines[:2]] == [
        "- --fsdp-double-buffer",
        "- --fsdp-db-use-persist-buf-on-alloc-fail",
    ]
    assert len(lines) == 3


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_fused_weight_gradients_are_refused_unless_parameters_are_sharded(strategy):
    (line,) = refusal(fusion=True, data_parallel_sharding_strategy=strategy)[1:]
    assert line.startswith("- --no-gradient-accumulation-fusion is required unless --data-parallel-sharding-strategy")


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_every_strategy_passes_without_fused_weight_gradients(strategy):
    check_fsdp_options(config(), options(data_parallel_sharding_strategy=strategy))


# ------------------------------------------------------------------------------------ rows, for megatron-core's configs


def configs(**changes):
    """Configurations of a model and of its sharding that fit, but for ``changes``."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    model = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        cuda_graph_impl="transformer_engine",
        cuda_graph_modules=[],
    )
    for name, value in changes.items():
        assert hasattr(model, name)
        setattr(model, name, value)
    sharding = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        fsdp_double_buffer=True,
        fsdp_db_use_persist_buf_on_alloc_fail=True,
    )
    return model, sharding


EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "add_bias_linear": False}
MISFITS: dict[str, dict[str, Any]] = {
    "--num-experts, whole layers, without --moe-use-grouped-tensor, or --cuda-graph-modules moe; not padded": EXPERTS,
    "--overlap-moe-expert-parallel-comm, --fsdp-double-buffer": EXPERTS
    | {"cuda_graph_modules": [CudaGraphModule.attn], "overlap_moe_expert_parallel_comm": True},
    "--cuda-graph-modules mlp, every layer with experts": EXPERTS | {"cuda_graph_modules": [CudaGraphModule.mlp]},
    "--cuda-graph-modules moe_preprocess without moe_router": EXPERTS
    | {"cuda_graph_modules": [CudaGraphModule.moe_preprocess]},
    "--cuda-graph-modules moe, moe_router or moe_preprocess, dense model": {
        "cuda_graph_modules": [CudaGraphModule.moe_router]
    },
    (
        "--recompute-granularity full, a graph for each layer: --cuda-graph-modules, "
        "--cuda-graph-layers-per-graph 1, or all in a pipeline, another sharding than optim_grads_params"
    ): {"recompute_granularity": "full", "cuda_graph_modules": [CudaGraphModule.attn]},
    "--recompute-granularity full, with dropout or --moe-input-jitter-eps": {
        "recompute_granularity": "full",
        "hidden_dropout": 0.1,
    },
    "--recompute-modules mlp, --disable-bias-linear missing": {
        "recompute_granularity": "selective",
        "recompute_modules": ["mlp"],
    },
    "--recompute-modules core_attn, mlp or moe in a graph, with dropout": {
        "recompute_granularity": "selective",
        "attention_dropout": 0.1,
    },
    "--cuda-graph-warmup-steps below 0": {"cuda_graph_warmup_steps": -1},
}


def test_configs_that_fit_pass():
    check_fsdp_options(*configs())


@pytest.mark.parametrize("flags", MISFITS)
def test_configs_are_refused_in_the_words_of_the_row(flags):
    with pytest.raises(ValueError) as error:
        check_fsdp_options(*configs(**MISFITS[flags]))
    (row,) = (row for row in TABLE if row.flags == flags)
    assert str(error.value).split("\n")[1:] == [f"- {row.words}"]


@pytest.mark.parametrize("changes", [{"train_iters": 1}, {"cuda_graph_modules": [CudaGraphModule.mamba]}])
def test_what_configs_do_not_say_is_not_refused(changes):
    model, sharding = configs()
    vars(model).update(changes)
    check_fsdp_options(model, sharding)


# ------------------------------------------------------------------------------------------- hooks, for local graphs


def wrapper_of_a_handler(sentinel):
    def wrapper(module, args, output=None):
        return None

    setattr(wrapper, sentinel, print)
    return wrapper


def layer_with(register, hook):
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    register(layer[0], hook)
    return layer


@pytest.mark.parametrize(
    ("register", "hook"),
    [
        (torch.nn.Module.register_forward_pre_hook, runs_outside_graphs(lambda module, args: None)),
        (torch.nn.Module.register_forward_hook, runs_outside_graphs(lambda module, args, output: None)),
        (torch.nn.Module.register_forward_pre_hook, wrapper_of_a_handler(BACKWARD_HANDLER)),
        (torch.nn.Module.register_forward_hook, wrapper_of_a_handler(BACKWARD_PRE_HANDLER)),
    ],
    ids=["before forward", "after forward", "after backward", "before backward"],
)
def test_a_layer_with_a_hook_of_megatron_fsdp_is_refused_for_local_graphs(register, hook):
    with pytest.raises(ValueError, match=r"--use-megatron-fsdp with --cuda-graph-impl local: .*transformer_engine"):
        refuse_fsdp_hooks(layer_with(register, hook))


def test_hooks_of_others_are_none_of_megatron_fsdps():
    refuse_fsdp_hooks(layer_with(torch.nn.Module.register_forward_hook, lambda module, args, output: None))


def test_hooks_of_this_distribution_that_are_not_megatron_fsdps_are_let_through():
    """Its name, megatron_fsdp_cuda_graphs, is in the path of all its modules."""

    def hook(module, args, output):
        return None

    hook.__module__ = "megatron_fsdp_cuda_graphs.doctor"
    refuse_fsdp_hooks(layer_with(torch.nn.Module.register_forward_hook, hook))
