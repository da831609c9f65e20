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
    "double buffer": Example(left_out=(DOUBLE_BUFFER,)),
    "persistent fallback": Example(left_out=(FALLBACK,)),
    "second version": Example(),  # of a later megatron-core, too
    "local graphs": Example("--cuda-graph-impl local"),
    "fused weight gradients": Example("--data-parallel-sharding-strategy optim", left_out=(FUSED,)),
    "torch fsdp2": Example("--use-torch-fsdp2", left_out=(SHARDED,)),
    "optimizer graph of torch fsdp2": Example("--use-torch-fsdp2 --optimizer-cuda-graph", left_out=(SHARDED,)),
    "full iteration of torch fsdp2": Example(
        "--use-torch-fsdp2 --cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad", left_out=(SHARDED,)
    ),
    "quantization with torch fsdp2": Example("--use-torch-fsdp2 --fp8-format hybrid", left_out=(SHARDED,)),
    "checkpoints of torch fsdp2": Example("--use-torch-fsdp2 --load checkpoints", left_out=(SHARDED,)),
    "checkpoints saved in the background": Example("--save checkpoints --async-save"),
    "unknown module": Example(),  # the parser takes none: set below
    "moe and router": Example(f"{MOE} moe moe_router {PADDED}"),
    "preprocess alone": Example(f"{MOE} moe_preprocess"),
    "moe modules of a dense model": Example("--cuda-graph-modules attn moe_router"),
    "mlp of an moe model": Example(f"{MOE} mlp"),
    "mamba of a gpt": Example("--cuda-graph-modules attn mamba"),
    "unpadded experts": Example(MOE.replace("--cuda-graph-modules", "")),
    "preprocess that waits": Example(f"{MOE} moe_router moe_preprocess --moe-expert-capacity-factor 1.0"),
    "sinkhorn router": Example(f"{MOE} attn moe_router --moe-router-load-balancing-type sinkhorn"),
    "router of chunks": Example(f"{MOE} moe_router --mlp-chunks-for-training 2"),
    "optimizer without states": Example("--optimizer sgd"),
    "other optimizers": Example("--optimizer lion"),
    "whole model of another sharding": Example(
        "--cuda-graph-layers-per-graph model --data-parallel-sharding-strategy optim_grads"
    ),
    "full recomputation": Example(f"{FULL} --cuda-graph-layers-per-graph 1"),
    "recomputed layers with dropout": Example(f"{FULL} --hidden-dropout 0.1"),
    "recomputation of layers": Example(FULL),
    "divided activations": Example(f"{FULL} --distribute-saved-activations --tensor-model-parallel-size 2"),
    "recomputed router": Example(f"{MOE} moe_router {SELECTIVE} moe"),
    "recomputed dropout": Example(f"--attention-dropout 0.1 {SELECTIVE} core_attn"),
    "recomputed mlp with bias": Example(f"{SELECTIVE} mlp"),
    "instances without overlap": Example("--num-distributed-optimizer-instances 2"),
    "outer shards of one instance": Example("--outer-dp-sharding-strategy optim"),
    "outer shards of unsharded parameters": Example(
        "--num-distributed-optimizer-instances 2 --overlap-grad-reduce --outer-dp-sharding-strategy optim"
        " --data-parallel-sharding-strategy optim_grads"
    ),
    "hybrid sharding": Example(
        "--num-distributed-optimizer-instances 2 --overlap-grad-reduce --outer-dp-sharding-strategy optim"
    ),
    "expert parallel overlap in a double buffer": Example(f"{MOE} attn {OVERLAP}"),
    "expert parallel overlap of whole layers": Example(
        f"{MOE.replace('--cuda-graph-modules', '')} {OVERLAP} {PADDED}", left_out=(DOUBLE_BUFFER,)
    ),
    "expert parallel overlap with fused weight gradients": Example(
        f"{MOE} attn {OVERLAP}", left_out=(DOUBLE_BUFFER, FUSED)
    ),
    "expert parallel overlap of stages": Example(
        f"{MOE} attn {OVERLAP} --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights",
        left_out=(DOUBLE_BUFFER,),
    ),
    "expert parallel overlap of overlapped shared experts": Example(
        f"{MOE} attn {OVERLAP} --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap",
        left_out=(DOUBLE_BUFFER,),
    ),
    "expert parallel overlap of packed sequences": Example(
        f"{MOE} attn {OVERLAP} {PACKED} --position-embedding-type none", left_out=(DOUBLE_BUFFER,)
    ),
    "optimizer graph with a loss scale": Example("--optimizer-cuda-graph --fp16"),
    "optimizer graph of changing weight decay": Example(
        "--optimizer-cuda-graph --start-weight-decay 0 --end-weight-decay 0.1 --weight-decay-incr-style linear"
    ),
    "largest logits of attention": Example("--log-max-attention-logit"),
    "optimizer graph without warm-up": Example("--optimizer-cuda-graph --cuda-graph-warmup-steps 0"),
    "negative warm-up": Example("--cuda-graph-warmup-steps -1"),
    "embedding in two stages": Example("--pipeline-model-parallel-size 2 --init-model-with-meta-device"),
    "hybrid stages without further tokens": Example(
        "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --mtp-num-layers 1 "
        "--hybrid-layer-pattern M*-M*-"
    ),
    "interleaved stages": Example(
        "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --num-layers 4"
        " --num-layers-per-virtual-pipeline-stage 1"
    ),
    "warm-up to the end": Example("--cuda-graph-warmup-steps 5"),
    "layers per graph of parts": Example("--cuda-graph-modules attn --cuda-graph-layers-per-graph all"),
    "pipeline": Example("--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"),
    "latent attention": Example("--multi-latent-attention"),
    "context parallel": Example("--context-parallel-size 2", left_out=(LOCAL,)),
    "experts of tensor parallel ranks": Example(f"{MOE} attn --tensor-model-parallel-size 2"),
    "checkpoints of gated layers that are not sharded": Example(
        "--save checkpoints --swiglu --data-parallel-sharding-strategy no_shard"
    ),
    "checkpoints that do not persist": Example("--non-persistent-save-interval 2 --non-persistent-ckpt-type global"),
    "few micro-batches of virtual stages": Example(
        "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --num-layers 4"
        " --num-layers-per-virtual-pipeline-stage 1 --microbatch-group-size-per-virtual-pipeline-stage 4"
        " --global-batch-size 2"
    ),
    "local layers": Example("--context-parallel-size 2"),
    "packed sequences": Example("--sft"),
    "packed sequences in graphs": Example(f"--sft {PACKED} --position-embedding-type none"),
    "packed rows of moe layers": Example(f"{MOE} moe_router --sft --micro-batch-size 2"),
    "packed sequences in rows": Example(f"{PACKED} --micro-batch-size 2"),
    "packed sequences without fused rotary embeddings": Example(
        f"{PACKED} --position-embedding-type rope --no-rope-fusion"
    ),
    "packed sequences of mamba layers": Example(f"{PACKED} --hybrid-layer-pattern *M"),
    "packed sequences beside graphs": Example("--sft --cuda-graph-modules mlp"),
    "user buffers": Example("--use-nccl-ub"),
    "sums in fp32 of what was sent in bf16": Example("--ddp-reduce-scatter-with-fp32-accumulation"),
    "averages in collectives": Example("--ddp-average-in-collective"),
    "all-gather group": Example("--create-all-gather-group"),
    "heterogeneous layers": Example("--heterogeneous-layers-config-path layers.json"),
    "fp8 parameters": Example("--fp8-format hybrid --fp8-param-gather"),
    "other recipes": Example("--fp8-format hybrid --fp8-recipe blockwise"),
    "delayed weight gradients": Example(f"{MOE} attn {OVERLAP} --delay-wgrad-compute", left_out=(DOUBLE_BUFFER,)),
    "sharded weights": Example("--tensor-parallel-num-weight-shards 2"),
    "hybrid models": Example("--hybrid-layer-pattern *-*-"),
    "whole layers": Example(),
    "attention": Example("--cuda-graph-modules attn"),
    "mlp": Example("--cuda-graph-modules mlp"),
    "router": Example(f"{MOE} moe_router"),
    "up to the dispatch": Example(f"{MOE} attn moe_router moe_preprocess"),
    "padded experts": Example(f"{MOE.replace('--cuda-graph-modules', PADDED)}"),
    "dropless experts": Example(MOE.replace("--cuda-graph-modules", "--moe-use-grouped-tensor")),
    "bounded tokens": Example(
        MOE.replace("--cuda-graph-modules", "--moe-use-grouped-tensor --expert-model-parallel-size 2")
        + " --moe-alltoall-capacity-factor 1.25"
    ),
    "overlapped shared experts": Example(
        f"{MOE} attn moe_router moe_preprocess --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap"
    ),
    "tied embeddings": Example(),
    "positions": Example("--position-embedding-type yarn"),
    "fp16": Example("--fp16"),
    "bf16": Example("--bf16"),
    "checkpoints": Example("--load checkpoints"),
    "dropout": Example("--hidden-dropout 0.1"),
    "recomputation": Example(f"{SELECTIVE} core_attn"),
    "strategies": Example("--data-parallel-sharding-strategy optim_grads"),
    "fused weight gradients of sharded parameters": Example(left_out=(FUSED,)),
    "multi-token prediction": Example("--mtp-num-layers 1 --position-embedding-type rope"),
    "optimizer graph": Example("--optimizer-cuda-graph"),
    "tensor parallel": Example("--tensor-model-parallel-size 2"),
    "expert parallel": Example(
        MOE.replace("--cuda-graph-modules", "--moe-use-grouped-tensor --expert-model-parallel-size 2")
    ),
    "expert parallel overlap": Example(
        f"{MOE} attn moe_router moe_preprocess {OVERLAP} --expert-model-parallel-size 2",
        left_out=(DOUBLE_BUFFER, FALLBACK),
    ),
    "fp8": Example("--fp8-format hybrid"),
}
ROWS = {row.name: row for row in TABLE}
REFUSED = [row for row in TABLE if row.verdict is Verdict.REFUSED]
INDEPENDENT = (
    *("double buffer", "persistent fallback", "fused weight gradients", "moe modules of a dense model"),
    *("full recomputation", "negative warm-up", "embedding in two stages"),
)
WARNED = [row for row in TABLE if row.verdict in (Verdict.NO_EFFECT, Verdict.NOT_TRIED)]
SAID = [*REFUSED, *WARNED]


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
    found["unknown module"].cuda_graph_modules = ["atn"]
    found["second version"].megatron_fsdp_version = 2
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
    assert len(ROWS) == len(TABLE)
    assert ROWS.keys() == EXAMPLES.keys()


@pytest.mark.parametrize("row", SAID, ids=lambda row: row.name)
def test_an_example_is_of_its_row(flags, row):
    assert row in rows_of(flags[row.name])


def test_examples_are_refused_for_their_rows_alone(flags):
    for row in REFUSED:
        first, *lines = refusal(flags[row.name]).split("\n")
        assert first.startswith(f"{row.sharding} with --cuda-graph-impl "), row.name
        assert lines == [f"- {row.words}"], row.name
        assert "--" in row.words, row.name


def test_examples_of_what_is_not_refused_pass(flags):
    errors = {row.name: refusal(flags[row.name]) for row in TABLE if row not in REFUSED}
    assert errors == dict.fromkeys(errors, "")


def test_megatrons_validation_refuses_in_the_words_of_the_rows():
    from megatron.training.arguments import validate_args

    for row in (row for row in REFUSED if str(EXAMPLES[row.name]) != FITTING + " "):  # others have no flags here
        with pytest.raises(ValueError) as error:
            validate_args(parsed(str(EXAMPLES[row.name])))
        assert row.words in str(error.value), row.name


def test_what_has_no_effect_or_was_not_tried_is_warned_of(flags, caplog):
    for row in WARNED:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_flags(flags[row.name])
        assert row.words in caplog.messages, row.name
        assert not any("\n" in message for message in caplog.messages), row.name


def test_nothing_is_said_of_flags_that_work(flags, caplog):
    for row in TABLE:
        if row not in SAID:
            assert rows_of(flags[row.name]) == [], row.name
            warn_of_flags(flags[row.name])
    assert not caplog.messages


@pytest.mark.parametrize("modules", ["moe", "attn moe"])
def test_graphs_of_moe_modules_need_padding_though_the_host_is_not_asked(modules):
    args = parsed(f"{FITTING} {MOE} {modules} --moe-use-grouped-tensor")
    assert "leave out --cuda-graph-modules" in refusal(args)


def test_megatrons_validation_warns(caplog):
    from megatron.training.arguments import validate_args

    with caplog.at_level(logging.WARNING):
        validate_args(parsed(str(EXAMPLES["warm-up to the end"])))
    assert ROWS["warm-up to the end"].words in caplog.messages


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
        refused = [ROWS["full iteration of torch fsdp2"]] if impl != "none" and args.use_torch_fsdp2 else []
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
    for row in TABLE:
        assert row.shown or row.verdict is Verdict.NOT_TRIED, row.name
        assert (REPOSITORY / row.shown).exists(), row.name
