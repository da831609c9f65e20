"""Test ``python -m megatron_fsdp_cuda_graphs plan``."""

import pytest

from megatron.core.transformer._cuda_graphs.te import capture_state
from megatron_fsdp_cuda_graphs import overlay
from megatron_fsdp_cuda_graphs.plan import command
from megatron_fsdp_cuda_graphs.plan.dry_stage import dry_stage
from megatron_fsdp_cuda_graphs.plan.flags import read_flags
from megatron_fsdp_cuda_graphs.plan.pools import why_unknown

from .conftest import DENSE, EXPERTS, FSDP, GRAPHS, SIZES, TRAINING

pytestmark = pytest.mark.sampled


def planned(capsys, arguments):
    """Run ``plan``; return its exit code and output lines."""
    code = command.plan(arguments)
    return code, capsys.readouterr().out.splitlines()


def graphs(lines):
    """Return the lines that list graphs."""
    return [line.strip() for line in lines if line.startswith(("    forward of ", "    backward of ", "    and "))]


def eager(lines):
    """Return the reason for each part of the model that runs eagerly."""
    found = (line.removeprefix("  eager: ") for line in lines if line.startswith("  eager: "))
    return dict(each.split(", because ", maxsplit=1) for each in found)


def test_whole_dense_model(capsys, flags):
    code, lines = planned(capsys, flags("--world-size 2", DENSE, "--num-layers 4"))
    assert code == 0
    assert lines[0] == "The flags work together."
    assert lines[1].startswith("Ranks: 2 (--world-size); parallel: data 2, tensor 1, pipeline 1")
    assert "  Order of passes: 1 -1 (chunk, minus for backward)" in lines
    assert graphs(lines) == ["forward of the whole model", "backward of the whole model"]
    assert not eager(lines)


PASSES = [("forward", 1), ("forward", 2), ("backward", 2), ("backward", 1)]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("--cuda-graph-layers-per-graph 1", "--cuda-graph-layers-per-graph is 1"),
        ("--cuda-graph-warmup-steps 0", "no step runs before capture: add --cuda-graph-layers-per-graph model"),
    ],
)
def test_each_layer_in_its_own_graph(capsys, flags, more, why):
    code, lines = planned(capsys, flags("--world-size 2", DENSE, "--num-layers 2", more))
    assert code == 0
    assert graphs(lines) == [f"{kind} of layer {each}" for kind, each in PASSES]
    assert eager(lines) == {"the model as a whole": why}


def test_masks_that_training_does_not_pass_take_no_memory(capsys, flags):
    def static_inputs(*more):
        shape = "--num-layers 2 --seq-length 4096 --cuda-graph-layers-per-graph model --micro-batch-size 1"
        _, lines = planned(capsys, flags(DENSE, shape, "--max-position-embeddings 4096", *more))
        return next(float(line.split()[0]) for line in lines if line.endswith("static inputs of graphs"))

    unmasked = static_inputs("--no-create-attention-mask-in-dataloader")
    assert static_inputs() - unmasked == pytest.approx(16)
    masked = static_inputs("--no-create-attention-mask-in-dataloader --cuda-graph-warmup-steps 0")
    assert masked - unmasked == pytest.approx(16)


def test_reason_against_the_whole_model(capsys, flags, monkeypatch):
    monkeypatch.setattr(capture_state, "_model_blockers", lambda stage, chunk: ["a test failed"])
    code, lines = planned(capsys, flags(DENSE, "--num-layers 2 --mtp-num-layers 1 --world-size 2"))
    assert code == 0
    assert "forward of MTP layer 1" in graphs(lines)
    assert eager(lines)["the model as a whole"] == "a test failed"


WHOLE = {
    "dropless experts": f"{EXPERTS} --moe-use-grouped-tensor",
    "multi-token prediction": "--mtp-num-layers 2 --mtp-use-repeated-layer",
    "multimodal positions": "--position-embedding-type mrope --mrope-section 2 3 3",
    "hybrid": "--hybrid-layer-pattern M*-/*M --spec tests.support.layers.hybrid_spec local",
}


@pytest.mark.parametrize("more", WHOLE.values(), ids=WHOLE)
def test_models_captured_whole(capsys, flags, more):
    layers = "" if "--hybrid" in more else "--num-layers 2"
    code, lines = planned(capsys, flags(DENSE, layers, more, "--world-size 4"))
    assert code == 0
    assert graphs(lines) == ["forward of the whole model", "backward of the whole model"]
    assert not eager(lines)


def test_parts_of_moe_layers(capsys, flags):
    modules = "--cuda-graph-modules attn moe_router"
    _, lines = planned(capsys, flags(DENSE, EXPERTS, "--num-layers 2 --world-size 2", modules))
    assert eager(lines)["the model as a whole"] == "only modules of layers are captured (--cuda-graph-modules)"


def test_recomputed_layers_without_a_model_graph(capsys, flags):
    more = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    _, lines = planned(capsys, flags(DENSE, "--num-layers 2 --world-size 2", more, "--cuda-graph-warmup-steps 0"))
    assert any(line.startswith("  No graphs: layers are recomputed") for line in lines)
    assert graphs(lines) == []


def test_latent_experts_have_no_pool_estimate(flags):
    args = read_flags(flags(DENSE, EXPERTS, "--num-layers 2 --moe-use-grouped-tensor"), None).args
    with dry_stage(args, 0) as helper:
        assert why_unknown(helper, args, of_layers=False) == ""
        helper.config.moe_latent_size = 16  # the flag needs TransformerEngine
        assert why_unknown(helper, args, of_layers=False) == "--moe-latent-size"


def test_pipeline_stages(capsys, flags):
    more = "--num-layers 4 --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"
    code, lines = planned(capsys, flags(DENSE, more, "--world-size 4 --global-batch-size 12"))
    assert code == 0
    orders = [line for line in lines if line.lstrip().startswith("Order")]
    assert [order.split(":")[1].split("(")[0].split() for order in orders] == [
        ["1", "1", "-1", "1", "-1", "-1"],
        ["1", "-1", "1", "-1", "1", "-1"],
    ]
    assert lines.count("Pipeline stage 2 of 2") == 1
    assert graphs(lines).count("forward of chunk 1 as a whole") == 6  # one per micro-batch and stage


def test_pipeline_with_a_shared_embedding(capsys, flags):
    more = "--mtp-num-layers 1 --num-layers-per-virtual-pipeline-stage 1"
    _, lines = planned(capsys, flags(DENSE, more, "--num-layers 4 --pipeline-model-parallel-size 2 --world-size 2"))
    assert "forward of chunk 1 as a whole" in graphs(lines)
    assert not eager(lines)


def test_all_refusals_are_listed_at_once(capsys, flags):
    fsdp = FSDP.replace("--fsdp-double-buffer ", "").replace("--fsdp-db-use-persist-buf-on-alloc-fail ", "")
    more = "--num-layers 2 --cuda-graph-warmup-steps -1 --cuda-graph-layers-per-graph 0"
    code, lines = planned(capsys, flags(fsdp, GRAPHS, SIZES, TRAINING, more))
    assert code == 1
    assert lines[0] == "The flags do not work together:"
    for flag in (
        "--fsdp-double-buffer",
        "--fsdp-db-use-persist-buf-on-alloc-fail",
        "--cuda-graph-warmup-steps",
        "--cuda-graph-layers-per-graph",
    ):
        assert sum(line.startswith(f"- {flag}") for line in lines) == 1, flag
    assert graphs(lines) == []


@pytest.mark.parametrize("impl", ["none", "local"])
def test_other_implementations_have_no_plan(capsys, flags, impl):
    given = f"--num-layers 2 --cuda-graph-impl {impl} --te-rng-tracker --no-check-for-nan-in-loss-and-grad"
    code, lines = planned(capsys, flags(SIZES, TRAINING, given))
    assert code == 0
    assert lines[-1] == f"No plan: --cuda-graph-impl is {impl}, not transformer_engine."


def test_vocabulary_of_a_tokenizer_is_required(capsys, flags):
    given = flags(DENSE.replace("--vocab-size 128", ""), "--num-layers 2")
    assert command.plan(given) == 2
    assert "Add --padded-vocab-size N" in capsys.readouterr().err
    assert command.plan([*given, "--padded-vocab-size", "128"]) == 0


def test_minimum_number_of_ranks_is_the_default(capsys, flags):
    more = "--num-layers 2 --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4"
    given = flags(DENSE, EXPERTS, more, "--cuda-graph-modules attn")
    code, lines = planned(capsys, given)
    assert code == 0
    assert lines[1].startswith("Ranks: 8 ")
    code, lines = planned(capsys, ["--world-size", "12", *given])
    assert code == 1
    assert any(line.startswith("- --world-size 12: ") and "multiple of 8 ranks" in line for line in lines)


def test_disabled_patch(capsys, flags, monkeypatch):
    monkeypatch.setattr(overlay, "is_active", lambda: False)
    monkeypatch.setenv(overlay.SWITCH, "0")
    assert command.plan(flags(DENSE, "--num-layers 2")) == 2
    assert f"{overlay.SWITCH}=0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "add the training flags"),
        ("--world-size 0 --num-layers 2", "--world-size must be a positive number"),
        ("--no-such-flag", "--no-such-flag"),
    ],
)
def test_usage_errors(capsys, arguments, message):
    assert command.plan(arguments.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) <= 2  # omits hundreds of lines of Megatron's usage message


def test_error_of_megatron_core(capsys):
    assert command.plan(["--num-layers", "2"]) == 1
    assert "- megatron-core: AssertionError: assert args.micro_batch_size is not None" in capsys.readouterr().out
