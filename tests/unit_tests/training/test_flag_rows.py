"""Every row of the table of flags, and every pair of rows, as typed on a command line."""

import logging
import sys
from argparse import ArgumentParser, Namespace
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from megatron.core.transformer._cuda_graphs.flags.checks import check_flags, warn_of_flags
from megatron.core.transformer._cuda_graphs.flags.options import Options
from megatron.core.transformer._cuda_graphs.flags.table import MEGATRON_FSDP, MODULES, TABLE, TORCH_FSDP, Verdict
from tests.support.on_cpu_backend import on_cpu_backend
from tests.support.working_flags import WORKING

REPOSITORY = Path(__file__).parents[3]
MODEL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 1 --train-iters 5 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 64
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --attention-dropout 0 --hidden-dropout 0
"""
SHARDED = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor"
GRAPHS = "--cuda-graph-impl transformer_engine"
DOUBLE_BUFFER = "--fsdp-double-buffer"
FALLBACK = "--fsdp-db-use-persist-buf-on-alloc-fail"
FITTING = f"{MODEL} {SHARDED} {GRAPHS} {DOUBLE_BUFFER} {FALLBACK}"
MOE = "--num-experts 4 --moe-token-dispatcher-type alltoall --disable-bias-linear --cuda-graph-modules"
PADDED = "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0"
PACKED = "--cuda-graph-packed-sequences 4"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
FUSED = "--no-gradient-accumulation-fusion"
LOCAL = "--transformer-impl local"
OVERLAP = "--overlap-moe-expert-parallel-comm --bf16"


@dataclass
class Example:
    """Flags of a row.

    Attributes:
        flags: What is added to ``FITTING``.
        left_out: What is taken from it.
    """

    flags: str = ""
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        line = f"{FITTING} {self.flags}"
        for text in self.left_out:
            line = line.replace(text, "")
        return line


EXAMPLES = {
    "--fsdp-double-buffer missing": Example(left_out=(DOUBLE_BUFFER,)),
    "--fsdp-db-use-persist-buf-on-alloc-fail missing": Example(left_out=(FALLBACK,)),
    "--megatron-fsdp-version 2, which megatron-core has from 0.20 on": Example(),  # of a later megatron-core, too
    "--cuda-graph-impl local": Example("--cuda-graph-impl local"),
    "--data-parallel-sharding-strategy other than optim_grads_params, fused gradient accumulation": Example(
        "--data-parallel-sharding-strategy optim", left_out=(FUSED,)
    ),
    "--use-torch-fsdp2": Example("--use-torch-fsdp2", left_out=(SHARDED,)),
    "--use-torch-fsdp2 with --optimizer-cuda-graph": Example(
        "--use-torch-fsdp2 --optimizer-cuda-graph", left_out=(SHARDED,)
    ),
    "--use-torch-fsdp2 with --cuda-graph-impl full_iteration": Example(
        "--use-torch-fsdp2 --cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad", left_out=(SHARDED,)
    ),
    "--use-torch-fsdp2 with --fp8-format or --fp4-format": Example(
        "--use-torch-fsdp2 --fp8-format hybrid", left_out=(SHARDED,)
    ),
    "--use-torch-fsdp2 with --save or --load": Example("--use-torch-fsdp2 --load checkpoints", left_out=(SHARDED,)),
    "--async-save": Example("--save checkpoints --async-save"),
    "--cuda-graph-modules with another name": Example(),  # the parser takes none: set below
    "--cuda-graph-modules moe moe_router": Example(f"{MOE} moe moe_router {PADDED}"),
    "--cuda-graph-modules moe_preprocess without moe_router": Example(f"{MOE} moe_preprocess"),
    "--cuda-graph-modules moe, moe_router or moe_preprocess, dense model": Example(
        "--cuda-graph-modules attn moe_router"
    ),
    "--cuda-graph-modules mlp, every layer with experts": Example(f"{MOE} mlp"),
    "--cuda-graph-modules mamba, --hybrid-layer-pattern missing": Example("--cuda-graph-modules attn mamba"),
    "--num-experts, whole layers, without --moe-use-grouped-tensor, or --cuda-graph-modules moe; not padded": Example(
        MOE.replace("--cuda-graph-modules", "")
    ),
    (
        "--cuda-graph-modules moe_preprocess, --moe-expert-capacity-factor or --moe-router-padding-for-fp8, not padded"
    ): Example(f"{MOE} moe_router moe_preprocess --moe-expert-capacity-factor 1.0"),
    "--moe-enable-routing-replay, router in graphs": Example(f"{MOE} moe_router --moe-enable-routing-replay"),
    "--moe-router-load-balancing-type sinkhorn, router in graphs": Example(
        f"{MOE} attn moe_router --moe-router-load-balancing-type sinkhorn"
    ),
    "--mlp-chunks-for-training above 1, --cuda-graph-modules moe_router": Example(
        f"{MOE} moe_router --mlp-chunks-for-training 2"
    ),
    "--optimizer sgd": Example("--optimizer sgd"),
    "--optimizer lion, soap or a kind of muon, --optimizer-cpu-offload": Example("--optimizer lion"),
    "--cuda-graph-layers-per-graph model, --data-parallel-sharding-strategy other than optim_grads_params": Example(
        "--cuda-graph-layers-per-graph model --data-parallel-sharding-strategy optim_grads"
    ),
    (
        "--recompute-granularity full, a graph for each layer: --cuda-graph-modules, "
        "--cuda-graph-layers-per-graph 1, or all in a pipeline, another sharding than optim_grads_params"
    ): Example(f"{FULL} --cuda-graph-layers-per-graph 1"),
    "--recompute-granularity full, with dropout or --moe-input-jitter-eps": Example(f"{FULL} --hidden-dropout 0.1"),
    "--recompute-granularity full, graphs of the whole model or of all layers": Example(FULL),
    "--distribute-saved-activations": Example(f"{FULL} --distribute-saved-activations --tensor-model-parallel-size 2"),
    "--recompute-modules moe with --cuda-graph-modules moe_router": Example(f"{MOE} moe_router {SELECTIVE} moe"),
    "--recompute-modules core_attn, mlp or moe in a graph, with dropout": Example(
        f"--attention-dropout 0.1 {SELECTIVE} core_attn"
    ),
    "--recompute-modules mlp, --disable-bias-linear missing": Example(f"{SELECTIVE} mlp"),
    "--num-distributed-optimizer-instances above 1, --overlap-grad-reduce missing": Example(
        "--num-distributed-optimizer-instances 2"
    ),
    "--outer-dp-sharding-strategy optim, one instance": Example("--outer-dp-sharding-strategy optim"),
    "--outer-dp-sharding-strategy optim, --data-parallel-sharding-strategy other than optim_grads_params": Example(
        "--num-distributed-optimizer-instances 2 --overlap-grad-reduce --outer-dp-sharding-strategy optim"
        " --data-parallel-sharding-strategy optim_grads"
    ),
    "--num-distributed-optimizer-instances, --outer-dp-sharding-strategy": Example(
        "--num-distributed-optimizer-instances 2 --overlap-grad-reduce --outer-dp-sharding-strategy optim"
    ),
    "--overlap-moe-expert-parallel-comm, --fsdp-double-buffer": Example(f"{MOE} attn {OVERLAP}"),
    "--overlap-moe-expert-parallel-comm, whole layers or --cuda-graph-modules mlp or moe": Example(
        f"{MOE.replace('--cuda-graph-modules', '')} {OVERLAP} {PADDED}", left_out=(DOUBLE_BUFFER,)
    ),
    "--overlap-moe-expert-parallel-comm, fused gradient accumulation": Example(
        f"{MOE} attn {OVERLAP}", left_out=(DOUBLE_BUFFER, FUSED)
    ),
    "--overlap-moe-expert-parallel-comm, --pipeline-model-parallel-size above 1": Example(
        f"{MOE} attn {OVERLAP} --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights",
        left_out=(DOUBLE_BUFFER,),
    ),
    "--overlap-moe-expert-parallel-comm, --moe-shared-expert-overlap": Example(
        f"{MOE} attn {OVERLAP} --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap",
        left_out=(DOUBLE_BUFFER,),
    ),
    "--overlap-moe-expert-parallel-comm, --cuda-graph-packed-sequences": Example(
        f"{MOE} attn {OVERLAP} {PACKED} --position-embedding-type none", left_out=(DOUBLE_BUFFER,)
    ),
    "--optimizer-cuda-graph with --fp16 or --loss-scale": Example("--optimizer-cuda-graph --fp16"),
    "--optimizer-cuda-graph, --weight-decay-incr-style linear or cosine": Example(
        "--optimizer-cuda-graph --start-weight-decay 0 --end-weight-decay 0.1 --weight-decay-incr-style linear"
    ),
    "--qk-clip or --log-max-attention-logit, attention in graphs": Example("--log-max-attention-logit"),
    "--optimizer-cuda-graph with --log-num-zeros-in-grad or --timing-log-level 1 or 2": Example(
        "--optimizer-cuda-graph --timing-log-level 1"
    ),
    "--optimizer-cuda-graph with --cuda-graph-warmup-steps 0": Example(
        "--optimizer-cuda-graph --cuda-graph-warmup-steps 0"
    ),
    "--cuda-graph-warmup-steps below 0": Example("--cuda-graph-warmup-steps -1"),
    (
        "--pipeline-model-parallel-size above 1, --init-model-with-meta-device, tied embeddings or --mtp-num-layers"
    ): Example("--pipeline-model-parallel-size 2 --init-model-with-meta-device"),
    (
        "--mtp-num-layers, --pipeline-model-parallel-size above 1, --hybrid-layer-pattern without a / and its layers"
    ): Example(
        "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --mtp-num-layers 1 "
        "--hybrid-layer-pattern M*-M*-"
    ),
    "--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank": Example(
        "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --num-layers 4"
        " --num-layers-per-virtual-pipeline-stage 1"
    ),
    "--cuda-graph-warmup-steps of --train-iters or more": Example("--cuda-graph-warmup-steps 5"),
    "--cuda-graph-layers-per-graph, --cuda-graph-modules": Example(
        "--cuda-graph-modules attn --cuda-graph-layers-per-graph all"
    ),
    "--pipeline-model-parallel-size": Example("--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"),
    "--multi-latent-attention": Example("--multi-latent-attention"),
    "--context-parallel-size": Example("--context-parallel-size 2", left_out=(LOCAL,)),
    "--num-experts, --tensor-model-parallel-size above 1, --sequence-parallel missing": Example(
        f"{MOE} attn --tensor-model-parallel-size 2"
    ),
    "--save, --swiglu, --data-parallel-sharding-strategy no_shard": Example(
        "--save checkpoints --swiglu --data-parallel-sharding-strategy no_shard"
    ),
    "--non-persistent-save-interval": Example("--non-persistent-save-interval 2 --non-persistent-ckpt-type global"),
    "--microbatch-group-size-per-virtual-pipeline-stage above the number of micro-batches": Example(
        "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --num-layers 4"
        " --num-layers-per-virtual-pipeline-stage 1 --microbatch-group-size-per-virtual-pipeline-stage 4"
        " --global-batch-size 2"
    ),
    "--transformer-impl local with --context-parallel-size above 1, --spec missing": Example(
        "--context-parallel-size 2"
    ),
    "--sft or --dataloader-inter-document-masking, attention in graphs, --cuda-graph-packed-sequences missing": Example(
        "--sft"
    ),
    "--cuda-graph-packed-sequences": Example(f"--sft {PACKED} --position-embedding-type none"),
    "--sft or --dataloader-inter-document-masking, --micro-batch-size above 1, MoE layers in graphs": Example(
        f"{MOE} moe_router --sft --micro-batch-size 2"
    ),
    "--cuda-graph-packed-sequences, --micro-batch-size above 1": Example(f"{PACKED} --micro-batch-size 2"),
    "--cuda-graph-packed-sequences, --no-rope-fusion, or yarn or mrope, which are not fused": Example(
        f"{PACKED} --position-embedding-type rope --no-rope-fusion"
    ),
    "--cuda-graph-packed-sequences, Mamba layers in graphs": Example(f"{PACKED} --hybrid-layer-pattern *M"),
    "--sft or --dataloader-inter-document-masking, attention not in graphs": Example("--sft --cuda-graph-modules mlp"),
    "--use-nccl-ub": Example("--use-nccl-ub"),
    "--ddp-reduce-scatter-with-fp32-accumulation": Example("--ddp-reduce-scatter-with-fp32-accumulation"),
    "--ddp-average-in-collective": Example("--ddp-average-in-collective"),
    "--create-all-gather-group": Example("--create-all-gather-group"),
    "--heterogeneous-layers-config-path": Example("--heterogeneous-layers-config-path layers.json"),
    "--fp8-param-gather, --fp8-recipe delayed or tensorwise": Example("--fp8-format hybrid --fp8-param-gather"),
    "--fp4-format or --fp8-recipe mxfp8": Example("--fp8-format hybrid --fp8-recipe mxfp8"),
    "--fp8-recipe blockwise or custom": Example("--fp8-format hybrid --fp8-recipe blockwise"),
    "--delay-wgrad-compute": Example(f"{MOE} attn {OVERLAP} --delay-wgrad-compute", left_out=(DOUBLE_BUFFER,)),
    "--tensor-parallel-num-weight-shards": Example("--tensor-parallel-num-weight-shards 2"),
    "--hybrid-layer-pattern": Example("--hybrid-layer-pattern *-*-"),
    "--cuda-graph-modules not given, dense model": Example(),
    "--cuda-graph-modules attn": Example("--cuda-graph-modules attn"),
    "--cuda-graph-modules mlp, dense layers": Example("--cuda-graph-modules mlp"),
    "--cuda-graph-modules moe_router": Example(f"{MOE} moe_router"),
    "--cuda-graph-modules attn moe_router moe_preprocess": Example(f"{MOE} attn moe_router moe_preprocess"),
    "--moe-pad-expert-input-to-capacity, whole layers or --cuda-graph-modules moe": Example(
        f"{MOE.replace('--cuda-graph-modules', PADDED)}"
    ),
    "--moe-use-grouped-tensor, whole layers or --cuda-graph-modules attn, moe_router or moe_preprocess": Example(
        MOE.replace("--cuda-graph-modules", "--moe-use-grouped-tensor")
    ),
    "--moe-alltoall-capacity-factor": Example(
        MOE.replace("--cuda-graph-modules", "--moe-use-grouped-tensor --expert-model-parallel-size 2")
        + " --moe-alltoall-capacity-factor 1.25"
    ),
    "--moe-shared-expert-overlap": Example(
        f"{MOE} attn moe_router moe_preprocess --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap"
    ),
    "tied embeddings (--untie-embeddings-and-output-weights not given)": Example(),
    "--position-embedding-type learned_absolute, rope, yarn, mrope or none": Example("--position-embedding-type yarn"),
    "--fp16, with a dynamic or a constant loss scale": Example("--fp16"),
    "--bf16": Example("--bf16"),
    "--save, --load": Example("--load checkpoints"),
    "--hidden-dropout, --attention-dropout": Example("--hidden-dropout 0.1"),
    "--recompute-modules core_attn, mlp, layernorm, moe, shared_experts, mla_up_proj": Example(
        f"{SELECTIVE} core_attn"
    ),
    "--data-parallel-sharding-strategy other than optim_grads_params": Example(
        "--data-parallel-sharding-strategy optim_grads"
    ),
    "fused gradient accumulation (--no-gradient-accumulation-fusion not given)": Example(left_out=(FUSED,)),
    "--mtp-num-layers": Example("--mtp-num-layers 1 --position-embedding-type rope"),
    "--optimizer-cuda-graph": Example("--optimizer-cuda-graph"),
    "--tensor-model-parallel-size, --sequence-parallel": Example("--tensor-model-parallel-size 2"),
    "--expert-model-parallel-size, --expert-tensor-parallel-size": Example(
        MOE.replace("--cuda-graph-modules", "--moe-use-grouped-tensor --expert-model-parallel-size 2")
    ),
    "--overlap-moe-expert-parallel-comm, --cuda-graph-modules attn, moe_router or moe_preprocess": Example(
        f"{MOE} attn moe_router moe_preprocess {OVERLAP} --expert-model-parallel-size 2",
        left_out=(DOUBLE_BUFFER, FALLBACK),
    ),
    "--fp8-format, --fp8-recipe delayed or tensorwise": Example("--fp8-format hybrid"),
    (
        "--manual-gc, --empty-unused-memory-level, --log-params-norm, --log-memory-to-tensorboard, "
        "--use-pytorch-profiler, --rampup-batch-size, --full-validation, --dataloader-type external"
    ): Example("--manual-gc --empty-unused-memory-level 2"),
}
ROWS = {row.flags: row for row in TABLE}
REFUSED = [row for row in TABLE if row.verdict is Verdict.REFUSED]
INDEPENDENT = (
    *(
        "--fsdp-double-buffer missing",
        "--fsdp-db-use-persist-buf-on-alloc-fail missing",
        ("--data-parallel-sharding-strategy other than optim_grads_params, fused gradient accumulation"),
        ("--cuda-graph-modules moe, moe_router or moe_preprocess, dense model"),
    ),
    *(
        (
            "--recompute-granularity full, a graph for each layer: --cuda-graph-modules, "
            "--cuda-graph-layers-per-graph 1, or all in a pipeline, another sharding than optim_grads_params"
        ),
        "--cuda-graph-warmup-steps below 0",
        ("--pipeline-model-parallel-size above 1, --init-model-with-meta-device, tied embeddings or --mtp-num-layers"),
    ),
)
WARNED = [row for row in TABLE if row.verdict is not Verdict.REFUSED]


@pytest.fixture(autouse=True, scope="module")
def _cpu_backend():
    with on_cpu_backend(), pytest.MonkeyPatch.context() as environment:
        environment.setenv("RANK", "0")
        environment.setenv("WORLD_SIZE", "2")
        environment.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        yield


@cache
def parser() -> ArgumentParser:
    """All flags, which take longer to list than to parse."""
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(ArgumentParser(allow_abbrev=False))


def parsed(line: str) -> Namespace:
    """The flags of a command line, not yet validated."""
    from megatron.training import arguments

    listed = parser()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["train.py", *line.split()])
        patched.setattr(arguments, "add_megatron_arguments", lambda _: listed)
        return deepcopy(arguments.parse_args())  # lists of defaults are the parser's


@pytest.fixture(scope="module")
def base():
    """The parsed flags that examples start from."""
    return parsed(FITTING)


@pytest.fixture(scope="module")
def flags():
    """The parsed flags of each example, by the name of its row."""
    found = {name: parsed(str(example)) for name, example in EXAMPLES.items()}
    found["--cuda-graph-modules with another name"].cuda_graph_modules = ["atn"]
    found["--megatron-fsdp-version 2, which megatron-core has from 0.20 on"].megatron_fsdp_version = 2
    return found


def sharding_of(args) -> str:
    return MEGATRON_FSDP if args.use_megatron_fsdp else TORCH_FSDP


def rows_of(args):
    """The rows that parsed flags are of."""
    return [row for row in TABLE if row.applies(Options(args), sharding_of(args))]


def refusal(args) -> str:
    """The error of a check; empty if the flags pass."""
    try:
        check_flags(args)
    except ValueError as error:
        return str(error)
    return ""


def test_the_flags_that_examples_start_from_pass(base):
    assert not refusal(base)
    assert rows_of(base) == []


def test_every_row_has_a_name_of_its_own_and_an_example():
    names = [*ROWS, *(row.flags for row in WORKING)]
    assert len({*names}) == len(TABLE) + len(WORKING)
    assert {*names} == EXAMPLES.keys()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.flags)
def test_an_example_is_of_its_row(flags, row):
    assert row in rows_of(flags[row.flags])


def test_examples_are_refused_for_their_rows_alone(flags):
    for row in REFUSED:
        first, *lines = refusal(flags[row.flags]).split("\n")
        assert first.startswith(f"{row.sharding} with --cuda-graph-impl "), row.flags
        assert lines == [f"- {row.words}"], row.flags
        assert "--" in row.words, row.flags


def test_examples_of_what_is_not_refused_pass(flags):
    names = [*(row.flags for row in WARNED), *(row.flags for row in WORKING)]
    errors = {name: refusal(flags[name]) for name in names}
    assert errors == dict.fromkeys(errors, "")


def test_megatrons_validation_refuses_in_the_words_of_the_rows():
    from megatron.training.arguments import validate_args

    for row in (row for row in REFUSED if str(EXAMPLES[row.flags]) != FITTING + " "):  # others have no flags here
        with pytest.raises(ValueError) as error:
            validate_args(parsed(str(EXAMPLES[row.flags])))
        assert row.words in str(error.value), row.flags


def test_what_has_no_effect_or_was_not_tried_is_warned_of(flags, caplog):
    for row in WARNED:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_flags(flags[row.flags])
        assert row.words in caplog.messages, row.flags
        assert not any("\n" in message for message in caplog.messages), row.flags


def test_nothing_is_said_of_flags_that_work(flags, caplog):
    for row in WORKING:
        assert rows_of(flags[row.flags]) == [], row.flags
        warn_of_flags(flags[row.flags])
    assert not caplog.messages


@pytest.mark.parametrize("modules", ["moe", "attn moe"])
def test_graphs_of_moe_modules_need_padding_though_the_host_is_not_asked(modules):
    args = parsed(f"{FITTING} {MOE} {modules} --moe-use-grouped-tensor")
    assert "leave out --cuda-graph-modules" in refusal(args)


def test_megatrons_validation_warns(caplog):
    from megatron.training.arguments import validate_args

    with caplog.at_level(logging.WARNING):
        validate_args(parsed(str(EXAMPLES["--cuda-graph-warmup-steps of --train-iters or more"])))
    assert ROWS["--cuda-graph-warmup-steps of --train-iters or more"].words in caplog.messages


def both(one: Namespace, other: Namespace, base: Namespace) -> Namespace:
    """``one`` with what ``other`` has changed of ``base``; lists are joined."""
    joined = dict(vars(one))
    for name, value in vars(other).items():
        if value != getattr(base, name, None):
            mine = joined.get(name)
            if isinstance(value, list) and isinstance(mine, list) and mine != getattr(base, name):
                value = [*mine, *value]
            joined[name] = value
    return Namespace(**joined)


def test_a_pair_is_refused_for_every_row_that_it_is_of(flags, base):
    for name, other in product(EXAMPLES, EXAMPLES):
        args = both(flags[name], flags[other], base)
        expected = {row.words for row in rows_of(args) if row.verdict is Verdict.REFUSED}
        assert {line.removeprefix("- ") for line in refusal(args).split("\n")[1:]} == expected, (name, other)


def test_two_rows_that_have_nothing_to_do_with_each_other_are_both_named(flags, base):
    for one, other in combinations(INDEPENDENT, 2):
        said = refusal(both(flags[one], flags[other], base))
        assert ROWS[one].words in said, (one, other)
        assert ROWS[other].words in said, (one, other)


@pytest.mark.parametrize("impl", ["none", "full_iteration"])
def test_of_graphs_that_megatron_core_makes_the_table_refuses_those_of_torchs_fsdp2_only(flags, impl):
    for name in EXAMPLES:
        args = Namespace(**vars(flags[name]) | {"cuda_graph_impl": impl})
        refused = (
            [ROWS["--use-torch-fsdp2 with --cuda-graph-impl full_iteration"]]
            if impl != "none" and args.use_torch_fsdp2
            else []
        )
        assert rows_of(args) == refused, name
        assert bool(refusal(args)) == bool(refused), name


def test_models_that_are_not_sharded_are_none_of_the_tables_business(flags, caplog):
    for name in EXAMPLES:
        args = Namespace(**vars(flags[name]) | {"use_megatron_fsdp": False, "use_torch_fsdp2": False})
        assert not refusal(args), name
        warn_of_flags(args)
        assert not caplog.messages, name


def test_flags_of_another_program_pass():
    check_flags(Namespace())
    warn_of_flags(Namespace())


def test_an_unknown_module_is_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit):
        parsed(f"{FITTING} --cuda-graph-modules atn")
    said = capsys.readouterr().err
    assert "argument --cuda-graph-modules: 'atn' is none of attn, mlp, moe" in said


@pytest.mark.parametrize("name", [*MODULES, "full", "full_iteration", "full_iteration_inference"])
def test_the_parser_takes_what_megatron_core_takes(name):
    assert len(parsed(f"{FITTING} --cuda-graph-modules {name}").cuda_graph_modules) == 1


def test_what_rows_say_shows_them_is_in_this_repository():
    for row in WORKING:
        assert (REPOSITORY / row.shown).is_file(), row.flags
