"""Megatron's own parser refuses per-layer CUDA graphs under Megatron-FSDP that would read moved buffers."""

import sys

import pytest

pytest.importorskip("megatron.core")

from tests.support.on_cpu_backend import on_cpu_backend

MODEL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 1 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 64
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
"""
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor"
DOUBLE_BUFFER = "--fsdp-double-buffer"
FALLBACK = "--fsdp-db-use-persist-buf-on-alloc-fail"
REASONS = {DOUBLE_BUFFER: "to another address in every iteration", FALLBACK: "does not fit the double buffer"}
GRAPHS = "--cuda-graph-impl transformer_engine"


@pytest.fixture(autouse=True, scope="module")
def _cpu_backend():
    with on_cpu_backend():
        yield


def step_by_step():
    """As a program does that looks at the arguments in between."""
    from megatron.training.arguments import parse_args, validate_args

    return validate_args(parse_args())


def at_once():
    """As a program's entry point does."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.global_vars import destroy_global_vars

    unset_num_microbatches_calculator()  # trainings in the same process leave theirs
    try:
        return parse_and_validate_args()
    finally:
        destroy_global_vars()
        unset_num_microbatches_calculator()


@pytest.fixture(params=[step_by_step, at_once], ids=lambda way: way.__name__)
def validate(request, monkeypatch):
    """Validates a command line in the environment of one of two ranks."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)

    def validate(*flags: str):
        monkeypatch.setattr(sys, "argv", ["train.py", *f"{MODEL} {' '.join(flags)}".split()])
        return request.param()

    return validate


@pytest.mark.parametrize("missing", [[DOUBLE_BUFFER], [FALLBACK], [DOUBLE_BUFFER, FALLBACK]], ids=" and ".join)
def test_each_missing_flag_is_named_with_the_reason(validate, missing):
    given = {DOUBLE_BUFFER, FALLBACK} - {*missing}
    with pytest.raises(ValueError) as error:
        validate(FSDP, GRAPHS, *given)
    for flag, reason in REASONS.items():
        assert (f"{flag} is required" in str(error.value)) == (flag in missing)
        assert (reason in str(error.value)) == (flag in missing)


def test_both_flags_pass(validate):
    args = validate(FSDP, GRAPHS, DOUBLE_BUFFER, FALLBACK)
    assert args.cuda_graph_impl == "transformer_engine"
    assert args.fsdp_double_buffer and args.fsdp_db_use_persist_buf_on_alloc_fail


@pytest.mark.parametrize("graphs", ["none", "full_iteration"])
def test_other_graphs_need_neither(validate, graphs):
    args = validate(FSDP, f"--cuda-graph-impl {graphs} --no-check-for-nan-in-loss-and-grad")
    assert args.cuda_graph_impl == graphs
    assert not args.fsdp_double_buffer and not args.fsdp_db_use_persist_buf_on_alloc_fail


def test_graphs_without_megatron_fsdp_need_neither(validate):
    assert validate(GRAPHS).cuda_graph_impl == "transformer_engine"


def test_graphs_asked_for_by_the_old_flag_are_checked_too(validate):
    with pytest.raises(ValueError, match=DOUBLE_BUFFER):
        validate(FSDP, "--external-cuda-graph")


def test_a_flag_that_implies_the_double_buffer_counts_as_it(validate):
    with pytest.raises(ValueError) as error:
        validate(FSDP, GRAPHS, "--use-nccl-ub")
    assert DOUBLE_BUFFER not in str(error.value)
    assert FALLBACK in str(error.value)


def test_fused_weight_gradients_need_sharded_parameters(validate, monkeypatch):
    flags = FSDP.replace("optim_grads_params", "optim_grads")
    monkeypatch.setattr(sys.modules[__name__], "MODEL", MODEL.replace("--no-gradient-accumulation-fusion", ""))
    with pytest.raises(ValueError, match="--no-gradient-accumulation-fusion is required"):
        validate(flags, GRAPHS, DOUBLE_BUFFER, FALLBACK)


@pytest.mark.parametrize(("flags", "expected"), [("", "error"), ("--cuda-graph-fallback eager", "eager")])
def test_the_configuration_says_what_a_failed_capture_does(validate, flags, expected):
    from megatron.training import argument_utils, arguments

    args = validate(GRAPHS, flags)
    assert args.cuda_graph_fallback == expected
    for module in (argument_utils, arguments):
        assert module.core_transformer_config_from_args(args).cuda_graph_fallback == expected


@pytest.mark.parametrize("impl", ["none", "local"])
def test_a_fallback_for_no_graphs_is_refused(validate, impl):
    with pytest.raises(ValueError, match=f"--cuda-graph-fallback eager needs .* got {impl}: leave it out"):
        validate(f"--cuda-graph-impl {impl} --cuda-graph-fallback eager")


class TestMonkeypatching:
    def test_a_function_that_megatron_core_calls(self, validate, monkeypatch):
        from megatron.training import arguments

        messages = []
        monkeypatch.setattr(arguments, "print_rank_0", lambda message, *rest, **options: messages.append(message))
        validate("--enable-cuda-graph")
        assert any("--enable-cuda-graph is deprecated" in message for message in messages)

    def test_a_function_that_the_patch_calls(self, validate, monkeypatch):
        from megatron.training import arguments

        checked = []
        monkeypatch.setattr(arguments, "check_flags", lambda args: checked.append(args.cuda_graph_impl))
        validate(FSDP, GRAPHS)
        assert {*checked} == {"transformer_engine"}

    def test_validate_args_itself_and_back(self, monkeypatch):
        from megatron.training import arguments

        ours = arguments.validate_args
        monkeypatch.setattr(sys, "argv", ["train.py", *MODEL.split()])
        with monkeypatch.context() as patched:
            patched.setattr(arguments, "validate_args", lambda *args: pytest.fail("called"))
            with pytest.raises(pytest.fail.Exception):
                at_once()
        assert arguments.validate_args is ours
