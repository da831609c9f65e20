"""Test that flags are rejected, warned about or accepted as listed in the flag table."""

import logging
import re
import sys
from argparse import ArgumentParser, Namespace
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core.transformer._cuda_graphs.flags.options import (
    FLAGS,
    MEGATRON_FSDP,
    Options,
    give_to_config,
    layers_per_graph,
)
from megatron.core.transformer._cuda_graphs.flags.table import (
    EXPERT_ROWS,
    MODULES,
    TABLE,
    Verdict,
    check,
    rows_of,
    warn,
)
from tests.support.compatibility import (
    FULL,
    MOE,
    OVERLAP,
    PACKED,
    PADDED,
    ROWS,
    SELECTIVE,
    STAGES,
    TORCH,
    WORKING,
    command_line,
    page,
    split,
    verified_values,
)
from tests.support.ranks.on_cpu_backend import on_cpu_backend

ROOT = Path(__file__).parents[5]
UNSHARDED = "!use-megatron-fsdp !data-parallel-sharding-strategy !ckpt-format"
OPTIMIZER_GRAPH = "--optimizer-cuda-graph with --use-megatron-fsdp or --use-torch-fsdp2"
WHOLE_OVERLAP = "--overlap-moe-expert-parallel-comm with DistributedDataParallel and whole layers"
RECOMPUTED_ALONE = "--recompute-granularity full with graphs per layer"
REDRAWN = "--recompute-granularity, --recompute-modules with dropout or random routing in recomputed modules"
SAVED_TENSORS = (
    "--save-activations-interval, --save-dgrads-interval, --save-tokens-per-expert-interval with graphs per layer"
)
OFFLOADED = "--fine-grained-activation-offloading"
OBSERVED = "--qk-clip, --log-max-attention-logit, --experimental-attention-variant dsa with attention in graphs"
TRACED_ROUTER = "--moe-routing-trace-path, --moe-enable-routing-replay with the router in graphs"
SINGLE_MODULES = "--te-precision-config-file, --kitchen-config-file, --kitchen-recipe-number"
CHUNKED = "--mlp-chunks-for-training with --cuda-graph-modules moe_router"
_EXAMPLES = [
    ("--fsdp-double-buffer not given", "!fsdp-double-buffer"),
    ("--fsdp-db-use-persist-buf-on-alloc-fail not given", "!fsdp-db-use-persist-buf-on-alloc-fail"),
    ("--cuda-graph-impl local", "--cuda-graph-impl local"),
    (
        "--data-parallel-sharding-strategy optim_grads, optim or no_shard without --no-gradient-accumulation-fusion",
        "!no-gradient-accumulation-fusion --data-parallel-sharding-strategy optim",
    ),
    (
        "--num-experts with whole MoE layers in graphs and token counts on the host",
        f"{MOE}",
    ),
    (
        "--moe-router-load-balancing-type sinkhorn with the router in graphs",
        f"{MOE} --cuda-graph-modules attn moe_router --moe-router-load-balancing-type sinkhorn",
    ),
    (TRACED_ROUTER, f"{MOE} --cuda-graph-modules moe_router --moe-routing-trace-path traces"),
    (CHUNKED, f"{MOE} --cuda-graph-modules moe_router --mlp-chunks-for-training 2"),
    (RECOMPUTED_ALONE, f"{FULL} --cuda-graph-layers-per-graph 1"),
    (REDRAWN, f"{SELECTIVE} core_attn --attention-dropout 0.1 --cuda-graph-modules mlp"),
    ("--overlap-moe-expert-parallel-comm", f"{MOE} --cuda-graph-modules attn {OVERLAP}"),
    (
        WHOLE_OVERLAP,
        f"!use-megatron-fsdp !data-parallel-sharding-strategy !ckpt-format {MOE} {OVERLAP} {PADDED}",
    ),
    (
        "--sft, --dataloader-inter-document-masking with attention in graphs, without --cuda-graph-packed-sequences",
        "--sft",
    ),
    (
        "--sft, --dataloader-inter-document-masking with --micro-batch-size above 1 and MoE layers in graphs",
        f"{MOE} --cuda-graph-modules moe_router --sft --micro-batch-size 2",
    ),
    ("--cuda-graph-packed-sequences with --micro-batch-size above 1", f"{PACKED} --micro-batch-size 2"),
    (
        "--cuda-graph-packed-sequences with unfused rotary embeddings (--no-rope-fusion, yarn, mrope)",
        f"{PACKED} --position-embedding-type rope --no-rope-fusion",
    ),
    ("--cuda-graph-packed-sequences with Mamba layers in graphs", f"{PACKED} --hybrid-layer-pattern *M"),
    (OBSERVED, "--experimental-attention-variant dsa"),
    (SAVED_TENSORS, f"{STAGES} --cuda-graph-modules attn --save-dgrads-interval 5"),
    (OFFLOADED, OFFLOADED),
    (SINGLE_MODULES, "--te-precision-config-file recipes.yaml"),
    (OPTIMIZER_GRAPH, "--optimizer-cuda-graph"),
    (
        "--use-torch-fsdp2 with --cuda-graph-impl transformer_engine or full_iteration",
        f"{UNSHARDED} {TORCH}",
    ),
    ("--cuda-graph-warmup-steps below 0", "--cuda-graph-warmup-steps -1"),
    (
        "--cuda-graph-layers-per-graph with --cuda-graph-modules, or model without optim_grads_params",
        "--cuda-graph-modules attn --cuda-graph-layers-per-graph model",
    ),
    ("--optimizer-cpu-offload", "--optimizer-cpu-offload"),
    ("--fp4-format, --fp8-recipe mxfp8 or custom", "--fp8-format hybrid --fp8-recipe mxfp8"),
    ("--async-save", "--save checkpoints --save-interval 5 --async-save"),
]
EXAMPLES = dict(_EXAMPLES)
# Rows that also apply to models that are not sharded.
FOR_ALL = {WHOLE_OVERLAP, OFFLOADED, RECOMPUTED_ALONE, REDRAWN, OBSERVED, SAVED_TENSORS, TRACED_ROUTER, CHUNKED}
FOR_ALL |= {SINGLE_MODULES}
# megatron-core's validation of these flags needs TransformerEngine.
NEEDS_TRANSFORMER_ENGINE = {OFFLOADED, OBSERVED}
LATER_CORE = "--megatron-fsdp-version 2"
# Options that the rows of grouped experts reject.
GROUPED: dict[str, Any] = {"moe_use_grouped_tensor": True, "num_moe_experts": 8}
GROUPED |= {"moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": 2, "add_bias_linear": False}
UNFIT_EXPERTS: list[tuple[str, dict[str, Any]]] = [
    ("--num-experts", {"num_moe_experts": None}),
    ("--moe-expert-capacity-factor", {"moe_expert_capacity_factor": 1.0}),
    ("--fp8-format", {"fp8": "hybrid"}),
    ("--fp16", {"fp16": True}),
    ("--hidden-size", {"hidden_size": 60}),
    ("the kernels of flex", {"moe_token_dispatcher_type": "flex"}),
    ("--expert-tensor-parallel-size", {"tensor_model_parallel_size": 2}),
    ("--delay-wgrad-compute", {"delay_wgrad_compute": True}),
    ("moe_act", {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}),
    ("--offload-modules", {"fine_grained_activation_offloading": True, "offload_modules": ["expert_fc1"]}),
    ("--use-transformer-engine-op-fuser", {"use_transformer_engine_op_fuser": True}),
    ("--moe-single-grouped-weight", {"moe_single_grouped_weight": True}),
    ("inference_optimized", {"transformer_impl": "inference_optimized"}),
    ("--use-torch-fsdp2", {"use_torch_fsdp2": True}),
    ("set --cuda-graph-impl transformer_engine", {"cuda_graph_impl": "local", "moe_alltoall_capacity_factor": None}),
    ("needs --moe-use-grouped-tensor", {"moe_use_grouped_tensor": False}),
    ("--expert-model-parallel-size above 1", {"expert_model_parallel_size": 1}),
    ("--rerun-mode validate_results", {"rerun_mode": "disabled"}),
    ("--cuda-graph-impl none or transformer_engine", {"cuda_graph_impl": "local"}),
    ("--pipeline-model-parallel-size", {"pipeline_model_parallel_size": 2}),
    ("--qk-clip", {"qk_clip": True}),
    ("--disable-bias-linear", {"add_bias_linear": True}),
    ("--save-dgrads-interval", {"save_dgrads_interval": 5}),
]


@pytest.fixture(autouse=True, scope="module")
def _cpu_backend():
    with on_cpu_backend(), pytest.MonkeyPatch.context() as environment:
        environment.setenv("RANK", "0")
        environment.setenv("WORLD_SIZE", "2")
        environment.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        yield


@cache
def parser() -> ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(ArgumentParser(allow_abbrev=False))


def parsed(example: str | list[str]) -> Namespace:
    """Parse the flags of an example, or a command line."""
    from megatron.training import arguments

    listed = parser()  # building a parser takes longer than parsing
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["train.py", *(command_line(example) if isinstance(example, str) else example)])
        patched.setattr(arguments, "add_megatron_arguments", lambda _: listed)
        return deepcopy(arguments.parse_args())  # the parser owns the lists that are defaults


def validated(example: str) -> Namespace:
    from megatron.training.arguments import validate_args

    return validate_args(parsed(example))


def refusal(options: Any) -> list[str]:
    """Return the reasons in the error, or an empty list if the options are accepted."""
    try:
        check(Options(options))
    except ValueError as error:
        return str(error).split("\n- ")[1:]
    return []


def test_every_row_has_an_example():
    others = [row for row in TABLE if row not in EXPERT_ROWS and row.flags != LATER_CORE]
    assert {row.flags for row in others} == EXAMPLES.keys()
    assert len({row.flags for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_matches_its_row_only(name):
    (row,) = rows_of(Options(parsed(EXAMPLES[name])))
    assert row.flags == name
    assert "--" in row.words


def test_validation_raises_the_message_of_the_row():
    for row in TABLE:
        if row.verdict is Verdict.REFUSED and row.flags in EXAMPLES.keys() - NEEDS_TRANSFORMER_ENGINE:
            with pytest.raises(ValueError, match="--cuda-graph-impl ") as error:
                validated(EXAMPLES[row.flags])
            assert str(error.value).split("\n- ")[1:] == [row.words]


def test_validation_logs_other_rows_as_warnings(caplog):
    row = next(row for row in TABLE if row.flags.startswith("--cuda-graph-layers-per-graph"))
    with caplog.at_level(logging.WARNING):
        validated(EXAMPLES[row.flags])
    assert row.words in caplog.messages
    for row in (row for row in TABLE if row.verdict is not Verdict.REFUSED):
        args = parsed(EXAMPLES[row.flags])
        assert refusal(args) == []
        caplog.clear()
        warn(Options(args))
        assert row.words in caplog.messages


def test_working_flags_pass_silently():
    for row in WORKING:
        options = Options(parsed(row.line))
        assert (rows_of(options), [*options.problems()]) == ([], []), row.flags
        assert (ROOT / row.shown).is_file(), row.flags


def test_version_2_of_megatron_fsdp_is_refused():
    args = parsed("")
    args.megatron_fsdp_version = 2
    assert [row.flags for row in rows_of(Options(args))] == [LATER_CORE]


def test_all_problems_are_listed_at_once():
    lines = refusal(parsed("!fsdp-double-buffer !fsdp-db-use-persist-buf-on-alloc-fail --cuda-graph-warmup-steps -1"))
    assert [line.split(" ")[0] for line in lines] == [
        "--fsdp-double-buffer",
        "--fsdp-db-use-persist-buf-on-alloc-fail",
        "--cuda-graph-warmup-steps",
    ]


@pytest.mark.parametrize("impl", ["none", "full_iteration"])
def test_full_iteration_is_refused_under_fsdp2_only(impl):
    for name in EXAMPLES.keys() - {OPTIMIZER_GRAPH}:
        args = parsed(EXAMPLES[name])
        args.cuda_graph_impl = impl
        for flag in FLAGS:
            setattr(args, flag.removeprefix("--").replace("-", "_"), FLAGS[flag].default)
        assert bool(refusal(args)) == (impl != "none" and args.use_torch_fsdp2), name


@pytest.mark.parametrize(
    ("row", "flags", "refused"),
    [
        (OPTIMIZER_GRAPH, f"{UNSHARDED} {TORCH} --optimizer-cuda-graph", True),
        (OPTIMIZER_GRAPH, "--optimizer-cuda-graph --cuda-graph-impl none", True),
        (OPTIMIZER_GRAPH, f"{UNSHARDED} --optimizer-cuda-graph", False),
        (RECOMPUTED_ALONE, FULL, False),
        (RECOMPUTED_ALONE, f"{FULL} --cuda-graph-modules attn", True),
        (RECOMPUTED_ALONE, f"{FULL} --data-parallel-sharding-strategy optim", True),
        (RECOMPUTED_ALONE, f"{FULL} {UNSHARDED}", True),
        (TRACED_ROUTER, f"{MOE} --moe-enable-routing-replay {UNSHARDED}", True),
        (TRACED_ROUTER, f"{MOE} --moe-enable-routing-replay --cuda-graph-impl local {UNSHARDED}", False),
        (TRACED_ROUTER, f"{MOE} --moe-enable-routing-replay --cuda-graph-modules attn", False),
        (OBSERVED, f"--log-max-attention-logit --cuda-graph-impl local {UNSHARDED}", False),
        (CHUNKED, f"{MOE} --cuda-graph-modules moe_router --mlp-chunks-for-training 2 {UNSHARDED}", True),
        (SAVED_TENSORS, f"{STAGES} --save-dgrads-interval 5", False),
        (SAVED_TENSORS, f"{STAGES} --save-dgrads-interval 5 --cuda-graph-layers-per-graph 1", True),
        (SAVED_TENSORS, "--save-activations-interval 5 --cuda-graph-layers-per-graph 1", False),
        (SAVED_TENSORS, "--save-activations-interval 5 --cuda-graph-layers-per-graph 1 --fp8-format hybrid", True),
        (SAVED_TENSORS, "--save-activations-interval 5 --fp8-format hybrid --fp8-recipe blockwise", True),
        (SAVED_TENSORS, f"{STAGES} {MOE} --save-tokens-per-expert-interval 5 --cuda-graph-modules moe_router", False),
        (SAVED_TENSORS, f"{STAGES} {MOE} --save-tokens-per-expert-interval 5 --cuda-graph-modules moe", True),
    ],
)
def test_refusals_depend_on_sharding_and_content_of_graphs(row, flags, refused):
    assert (row in [each.flags for each in rows_of(Options(parsed(flags)))]) == refused


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (f"{FULL} --hidden-dropout 0.1", True),
        (f"{FULL} --moe-router-force-biased 0.1", True),
        (f"{SELECTIVE} moe --moe-router-force-load-balancing", True),
        (f"{SELECTIVE} moe --moe-input-jitter-eps 0.1 {UNSHARDED}", True),
        (f"{SELECTIVE} moe --hidden-dropout 0.1 --attention-dropout 0.1", False),
        (f"{SELECTIVE} core_attn --hidden-dropout 0.1 --moe-input-jitter-eps 0.1", False),
    ],
)
def test_recomputed_modules_must_not_draw_numbers(flags, refused):
    assert (REDRAWN in [row.flags for row in rows_of(Options(parsed(flags)))]) == refused


def test_unsharded_models_match_few_rows():
    for name in EXAMPLES:
        args = parsed(EXAMPLES[name])
        args.use_megatron_fsdp = args.use_torch_fsdp2 = False
        args.cuda_graph_layers_per_graph = None
        assert {row.flags for row in rows_of(Options(args))} <= FOR_ALL, name
    assert refusal(Namespace()) == []


def test_deprecated_spellings_are_checked():
    with pytest.raises(ValueError, match="--fsdp-double-buffer is required"):
        validated("!cuda-graph-impl !fsdp-double-buffer --external-cuda-graph")


def test_flag_implying_the_double_buffer_counts():
    assert validated("!fsdp-double-buffer --use-nccl-ub").fsdp_double_buffer


@pytest.mark.parametrize("name", [*MODULES, "full", "full_iteration"])
def test_parser_accepts_modules_of_megatron_core(name):
    assert len(parsed(f"--cuda-graph-modules {name}").cuda_graph_modules) == 1


def test_error_for_unknown_module_names_the_flag(capsys):
    with pytest.raises(SystemExit):
        parsed("--cuda-graph-modules atn")
    assert "argument --cuda-graph-modules: unknown module 'atn': use attn, mlp, moe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--cuda-graph-packed-sequences 0", "--cuda-graph-packed-sequences must be a positive number .* got 0"),
        ("--cuda-graph-layers-per-graph all", r"must be model or 1 \(all was removed: use model\), got all"),
        ("--moe-alltoall-capacity-factor nan", "--moe-alltoall-capacity-factor must be above 0, .* got nan"),
        ("--cuda-graph-impl none --cuda-graph-fallback eager", "--cuda-graph-fallback eager needs .* got none"),
        ("!use-megatron-fsdp --cuda-graph-layers-per-graph 1", "--cuda-graph-layers-per-graph needs --use-megatron"),
    ],
)
def test_invalid_values_and_unused_flags_are_refused(flags, words):
    with pytest.raises(ValueError, match=words):
        check(Options(parsed(flags)))


def test_packed_sequences_work_without_graphs():
    assert refusal(parsed(f"--cuda-graph-impl none {PACKED}")) == []


@pytest.mark.parametrize("given", ["model", "1", 1])
def test_layers_per_graph_accepts_words_and_numbers(given):
    assert str(layers_per_graph(SimpleNamespace(cuda_graph_layers_per_graph=given))) == str(given)


def test_configurations_have_the_flags_of_this_patch():
    config = SimpleNamespace()
    give_to_config(parsed("--cuda-graph-fallback eager --moe-use-grouped-tensor"), config)
    assert vars(config) == {
        "cuda_graph_fallback": "eager",
        "cuda_graph_layers_per_graph": None,
        "cuda_graph_packed_sequences": None,
        "moe_use_grouped_tensor": True,
        "moe_alltoall_capacity_factor": None,
    }
    from megatron.training import arguments

    args = validated("--cuda-graph-fallback eager")
    assert arguments.core_transformer_config_from_args(args).cuda_graph_fallback == "eager"


@pytest.mark.parametrize(("words", "changes"), UNFIT_EXPERTS)
def test_grouped_and_bounded_experts_refuse_flags(words, changes):
    lines = refusal(SimpleNamespace(**GROUPED | {"moe_alltoall_capacity_factor": 1.25} | changes))
    assert any(line.startswith("--moe-") and words in line for line in lines)


def test_every_row_of_grouped_experts_is_tested():
    given = GROUPED | {"moe_alltoall_capacity_factor": 1.25}
    reached = {row for _, changes in UNFIT_EXPERTS for row in rows_of(Options(SimpleNamespace(**given | changes)))}
    assert {*EXPERT_ROWS} <= reached


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden_size": 64, "moe_latent_size": None, "moe_token_dispatcher_type": "allgather"},
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]},
        {"moe_alltoall_capacity_factor": 1.25},
        {"moe_use_grouped_tensor": False, "fp8": "hybrid", "moe_token_dispatcher_type": "flex"},
    ],
)
def test_flags_compatible_with_grouped_experts_pass(changes):
    assert refusal(SimpleNamespace(**GROUPED | changes)) == []


def configs(**changes: Any) -> Options:
    """Return valid options, with ``changes`` to the model's configuration."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "cuda_graph_impl": "transformer_engine"}
    model = TransformerConfig(**sizes, cuda_graph_modules=[], hidden_dropout=0.0, attention_dropout=0.0)
    vars(model).update(changes)
    sharding = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params",
        fsdp_double_buffer=True,
        fsdp_db_use_persist_buf_on_alloc_fail=True,
    )
    return Options(model, sharding, sharding=MEGATRON_FSDP)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({}, None),
        ({"num_moe_experts": 4}, "--num-experts with whole"),
        ({"recompute_granularity": "full", "hidden_dropout": 0.1}, REDRAWN),
        ({"cuda_graph_warmup_steps": -1}, "--cuda-graph-warmup-steps below 0"),
    ],
)
def test_configurations_are_checked_like_flags(changes, flag):
    rows = rows_of(configs(**changes))
    assert [row.flags[: len(flag)] for row in rows] == [flag] if flag else rows == []


def test_committed_page_matches_the_table():
    assert (ROOT / "docs" / "compatibility.md").read_text() == page(), "run make docs"


def test_flags_of_the_readme_work():
    block = re.findall(r"^    --.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    flags = " ".join(block)
    assert "--cuda-graph-impl transformer_engine" in flags
    base = "!use-megatron-fsdp !data-parallel-sharding-strategy !ckpt-format !cuda-graph-impl !fsdp-double-buffer"
    options = Options(parsed(f"{base} !fsdp-db-use-persist-buf-on-alloc-fail !no-gradient-accumulation-fusion {flags}"))
    assert options.sharding == MEGATRON_FSDP
    assert (rows_of(options), [*options.problems()]) == ([], [])


def test_flags_of_a_row_share_its_condition():
    assert split("--a x or y, --b or --c with --d and e") == [
        ("--a x or y", "with --d and e"),
        ("--b", "with --d and e"),
        ("--c", "with --d and e"),
    ]


def test_page_lists_each_flag_of_a_row_in_order():
    lines = [line.split(" | ") for line in page().splitlines() if line.startswith("| --")]
    flags = [line[0].split()[1] for line in lines]
    assert flags == sorted(flags)
    assert {*flags} == {item.split()[0] for row in ROWS for item, _ in split(row.flags)}


def test_cell_lists_values_that_were_verified():
    facts = {"--a", "--a x", "--b not given"}
    assert [verified_values(item, facts) for item in ("--a", "--a x", "--a x or y", "--b not given", "--c")] == [
        *("yes", "yes", "x", "yes", ""),
    ]
