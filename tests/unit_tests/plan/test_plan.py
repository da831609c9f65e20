"""``python -m megatron_fsdp_cuda_graphs plan``."""

import subprocess
import sys

import pytest

from megatron.core.transformer._cuda_graphs.te import capture_state
from megatron_fsdp_cuda_graphs import overlay
from megatron_fsdp_cuda_graphs.plan import command

from .conftest import DENSE, EXPERTS, FSDP, GRAPHS, SIZES, TRAINING

pytestmark = pytest.mark.sampled


def planned(capsys, arguments):
    """The exit code and the lines of a plan."""
    code = command.plan(arguments)
    return code, capsys.readouterr().out.splitlines()


def graphs(lines):
    """The graphs of a stage, as listed."""
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("Graphs:"))
    end = next(i for i, line in enumerate(lines) if line.lstrip().startswith("Memory"))
    return [line.strip() for line in lines[start + 1 : end]]


def test_a_dense_model(capsys, flags):
    code, lines = planned(capsys, flags("--world-size 2", DENSE, "--num-layers 4"))
    assert code == 0
    assert lines[0] == "The flags fit together."
    assert lines[1].startswith("Ranks: 2 (--world-size); parallel: data 2, tensor 1, pipeline 1")
    assert "  Order of passes: 1 -1 (chunk, minus for backward)" in lines
    assert graphs(lines) == ["forward of the whole model", "backward of the whole model"]
    assert lines[-1] == "- none"


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        ("--cuda-graph-layers-per-graph all", "drop --cuda-graph-layers-per-graph"),
        ("--cuda-graph-warmup-steps 0", "add --cuda-graph-layers-per-graph model"),
    ],
)
def test_all_layers(capsys, flags, more, advice):
    code, lines = planned(capsys, flags("--world-size 2", DENSE, "--num-layers 4", more))
    assert code == 0
    assert graphs(lines) == ["forward of layers 1 to 4", "backward of layers 4 to 1"]
    assert lines[-1] == f"- to graph embedding; final norm; output layer and losses: {advice}"


def test_one_layer_per_graph(capsys, flags):
    code, lines = planned(capsys, flags(DENSE, "--num-layers 2 --cuda-graph-layers-per-graph 1 --world-size 2"))
    assert code == 0
    assert graphs(lines) == [
        *("forward of layer 1", "forward of layer 2"),
        *("backward of layer 2", "backward of layer 1"),
    ]


@pytest.fixture
def layers_only(monkeypatch):
    """Something rules out the whole model, and nothing all layers of it."""
    monkeypatch.setattr(capture_state, "_TABLE", ((capture_state.MODEL, "{} says so", lambda stage, chunk: "a test"),))


RECOMPUTE = "--num-layers 4 --world-size 2 --recompute-granularity full --recompute-method"


@pytest.mark.parametrize(
    ("more", "inputs", "layers"),
    [
        ("--num-layers 4 --world-size 2", 0, 4),
        (f"{RECOMPUTE} uniform --recompute-num-layers 1", 4, 1),
        (f"{RECOMPUTE} uniform --recompute-num-layers 3", 2, 3),
        (f"{RECOMPUTE} uniform --recompute-num-layers 9", 1, 4),
        (f"{RECOMPUTE} block --recompute-num-layers 1", 1, 3),
        (f"{RECOMPUTE} block --recompute-num-layers 4", 4, 1),
    ],
)
def test_activations_of_layers_that_are_computed_again(capsys, flags, more, inputs, layers):
    tokens, hidden = 1024 * 2, 32
    _, lines = planned(capsys, flags(DENSE, "--seq-length 1024 --max-position-embeddings 1024", more))
    assert graphs(lines) == ["forward of the whole model", "backward of the whole model"]
    (line,) = (line for line in lines if "estimated: activations" in line)
    expected = tokens * (inputs * 2 * hidden + layers * (18 * hidden + 4 * 4 * hidden))
    assert float(line.split()[0]) == round(expected / 2**20, 1)


@pytest.mark.parametrize(("ranks", "rows"), [(1, []), (2, [2 * 8192 * 2]), (4, [4 * 8192 * 1])])
def test_the_room_for_tokens_of_experts_of_several_ranks(capsys, flags, ranks, rows):
    more = "--num-layers 2 --moe-use-grouped-tensor --seq-length 4096 --max-position-embeddings 4096 --world-size 4"
    _, lines = planned(capsys, flags(DENSE, EXPERTS, more, f"--expert-model-parallel-size {ranks}"))
    found = [line.split() for line in lines if "rows of tokens that experts have room for" in line]
    assert [(mib, number) for mib, _, _, number, *_ in found] == [
        (f"{each * 32 * 2 / 2**20:.1f}", str(each)) for each in rows
    ]


@pytest.mark.usefixtures("layers_only")
def test_why_the_whole_model_cannot_be_captured(capsys, flags):
    more = "--num-layers 2 --cuda-graph-layers-per-graph model --mtp-num-layers 1"
    code, lines = planned(capsys, flags(DENSE, more, "--world-size 2"))
    assert code == 0
    assert "forward of MTP layer 1" in graphs(lines)
    assert lines[-1].endswith("output layer and losses: not possible: a test says so")


INSTANCES = "--num-distributed-optimizer-instances 2 --overlap-grad-reduce"
PACKED = "--cuda-graph-packed-sequences 4 --micro-batch-size 1 --position-embedding-type none"
MROPE = "--position-embedding-type mrope --mrope-section 2 3 3"
PARTS = "--context-parallel-size 2 --spec tests.support.layers"  # of sequences
WHOLE = {
    "as asked for": "--cuda-graph-layers-per-graph model",
    "FP8": "--fp8-format hybrid",
    "FP8 parameters": "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather",
    "dropless experts": f"{EXPERTS} --moe-use-grouped-tensor",
    "multi-token prediction": "--mtp-num-layers 1",
    "multimodal positions": MROPE,
    "multimodal positions of parts": f"{MROPE} {PARTS}.gathering_attention local_layers",
    "packed": PACKED,
    "parts of packed": f"{PACKED} {PARTS}.packed_attention local_layer",
    "HSDP": INSTANCES,
    "HSDP with a sharded optimizer": f"{INSTANCES} --outer-dp-sharding-strategy optim",
    "context parallelism": "--context-parallel-size 2",
    "NCCL user buffers": "--use-nccl-ub",
    "hybrid": "--hybrid-layer-pattern M*-/*M --spec tests.support.layers.hybrid_spec local",
}


@pytest.mark.parametrize("more", WHOLE.values(), ids=WHOLE)
def test_models_that_are_captured_whole(capsys, flags, more):
    layers = "" if "--hybrid" in more else "--num-layers 2"
    code, lines = planned(capsys, flags(DENSE, layers, more, "--world-size 4"))
    assert code == 0
    assert graphs(lines) == ["forward of the whole model", "backward of the whole model"]
    assert lines[-1] == "- none"


@pytest.mark.parametrize(
    "more", ["", "--mtp-num-layers 1", "--mtp-num-layers 1 --num-layers-per-virtual-pipeline-stage 1"]
)
def test_stages_that_share_the_embedding(capsys, flags, more):
    given = flags(DENSE, more, "--num-layers 4 --pipeline-model-parallel-size 2 --world-size 2")
    code, lines = planned(capsys, [word for word in given if word != "--untie-embeddings-and-output-weights"])
    assert code == 0
    assert "forward of chunk 1 as a whole" in graphs(lines)
    assert lines[-1] == "- none"


def test_parts_of_layers(capsys, flags):
    code, lines = planned(capsys, flags(DENSE, "--num-layers 1 --cuda-graph-modules attn --world-size 2"))
    assert code == 0
    assert graphs(lines) == ["forward of layer 1", "backward of layer 1"]
    assert "    the graphs' pool is not estimated for these layers" in lines
    assert "- to graph embedding; final norm; output layer and losses: drop --cuda-graph-modules" in lines


def test_parts_to_add_are_those_that_explain_names(capsys, flags):
    given = flags(DENSE, EXPERTS, "--num-layers 2 --moe-layer-freq ([0,1]) --cuda-graph-modules attn --world-size 2")
    code, lines = planned(capsys, given)
    assert code == 0
    added = lines[lines.index("Flags to add or drop:") + 1 :]
    assert "- to graph MLP of dense layers, with the norm before it: --cuda-graph-modules attn mlp" in added
    assert command.explain(given) == 0
    named = {line.partition("to graph it: ")[2] for line in capsys.readouterr().out.splitlines()} - {""}
    assert {line.rpartition(": ")[2] for line in added} == named


def test_what_layers_do_not_take(capsys, flags):
    """It ends a job with local layers where it builds its model, unless there is Apex."""
    more = "--tensor-model-parallel-size 2 --sequence-parallel"
    assert command.plan(flags(DENSE, "--num-layers 2 --transformer-impl local --world-size 2", more)) == 1
    out, err = capsys.readouterr()
    assert "sequence parallel not supported by torch LayerNorm" in out + err


def test_long_lists_are_cut(capsys, flags):
    arguments = flags(DENSE, "--num-layers 8 --cuda-graph-layers-per-graph 1 --world-size 2")
    _, lines = planned(capsys, arguments)
    assert graphs(lines)[-1] == "and 4 more (--every-graph lists them)"
    _, lines = planned(capsys, ["--every-graph", *arguments])
    assert len(graphs(lines)) == 16


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
    assert graphs(lines).count("forward of chunk 1 as a whole") == 3  # a micro-batch each, in the first stage


@pytest.mark.parametrize(
    ("layers_per_graph", "first"), [("model", "forward of chunk 1 as a whole"), ("all", "forward of layer 1")]
)
def test_virtual_pipeline_stages(capsys, flags, layers_per_graph, first):
    more = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    given = flags(DENSE, more, "--untie-embeddings-and-output-weights --world-size 2 --global-batch-size 4")
    _, lines = planned(capsys, [*given, "--cuda-graph-layers-per-graph", layers_per_graph])
    assert graphs(lines)[0] == first


def test_all_refusals_come_at_once(capsys, flags):
    fsdp = FSDP.replace("--fsdp-double-buffer ", "").replace("--fsdp-db-use-persist-buf-on-alloc-fail ", "")
    more = "--num-layers 2 --cuda-graph-warmup-steps -1 --cuda-graph-layers-per-graph 0"
    code, lines = planned(capsys, flags(fsdp, GRAPHS, SIZES, TRAINING, more))
    assert code == 1
    assert lines[0] == "The flags do not fit together:"
    for flag in (
        "--fsdp-double-buffer",
        "--fsdp-db-use-persist-buf-on-alloc-fail",
        "--cuda-graph-warmup-steps",
        "--cuda-graph-layers-per-graph",
    ):
        assert sum(line.startswith(f"- {flag}") for line in lines) == 1, flag
    assert not any("Graphs" in line for line in lines)


def test_without_graphs_it_says_what_to_add(capsys, flags):
    code, lines = planned(capsys, flags(FSDP, SIZES, TRAINING, EXPERTS, "--num-layers 2"))
    assert code == 0
    assert "No layer would be captured: --cuda-graph-impl is none." in lines
    assert lines[-2] == "- --cuda-graph-impl transformer_engine: layers as graphs"
    assert lines[-1].startswith("- --num-experts with whole layers or moe in graphs")


def test_it_asks_for_the_vocabulary_of_a_tokenizer(capsys, flags, without):
    given = without(flags(DENSE, "--num-layers 2"), "--vocab-size")
    assert command.plan(given) == 2
    assert "add --padded-vocab-size N" in capsys.readouterr().err
    assert command.plan([*given, "--padded-vocab-size", "128"]) == 0
    assert command.plan([*without(given, "--cuda-graph-impl"), "--cuda-graph-impl", "none"]) == 0  # builds no model


def test_it_says_which_graphs_it_does_not_know(capsys, flags):
    local = "--num-layers 2 --cuda-graph-impl local --te-rng-tracker --no-check-for-nan-in-loss-and-grad"
    code, lines = planned(capsys, flags(SIZES, TRAINING, local))
    assert code == 0
    assert "These commands know only graphs of --cuda-graph-impl transformer_engine, not of local." in lines
    assert lines[-1] == "- none"


def test_the_fewest_ranks_are_the_default(capsys, flags):
    more = "--num-layers 2 --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4"
    modules = "--cuda-graph-modules attn"
    code, lines = planned(capsys, flags(DENSE, EXPERTS, more, modules))
    assert code == 0
    assert lines[1].startswith("Ranks: 8 ")  # and no remark: that tensor parallelism divides weights is none


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, "--tensor-model-parallel-size 2 --num-distributed-optimizer-instances 2 --overlap-grad-reduce"),
        (2, f"{EXPERTS} --cuda-graph-modules attn --tensor-model-parallel-size 2 --expert-model-parallel-size 2"),
        (6, f"{EXPERTS} --cuda-graph-modules attn --expert-model-parallel-size 4"),
    ],
)
def test_ranks_that_have_no_room_for_the_parallel_sizes(capsys, flags, ranks, more):
    """megatron-core notices when a job has started."""
    code, lines = planned(capsys, flags(DENSE, "--num-layers 2", more, f"--world-size {ranks}"))
    assert code == 1
    (said,) = (line for line in lines if line.startswith(f"- --world-size {ranks}: "))
    assert said.endswith("need a multiple of 4 ranks")


def test_a_package_that_is_not_installed(capsys, flags, monkeypatch):
    from megatron_fsdp_cuda_graphs.plan import dry_stage

    def models(args):
        raise ImportError("MambaSSM is not installed")

    monkeypatch.setattr(dry_stage, "_models", models)
    assert command.plan(flags(DENSE, "--num-layers 2")) == 2
    assert "MambaSSM is not installed" in capsys.readouterr().err


def test_the_patch_is_off(capsys, flags, monkeypatch):
    monkeypatch.setattr(overlay, "is_active", lambda: False)
    monkeypatch.setenv(overlay.SWITCH, "0")
    assert command.plan(flags(DENSE, "--num-layers 2")) == 2
    assert f"{overlay.SWITCH}=0 turns the patch off" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "give the flags of a training"),
        ("--world-size 0 --num-layers 2", "--world-size must be a positive number"),
        ("--no-such-flag", "--no-such-flag"),
        ("--num-layers two", "--num-layers"),
    ],
)
def test_usage(capsys, arguments, said):
    assert command.plan(arguments.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) <= 2  # Megatron's usage has hundreds of lines


def test_a_flag_that_is_missing(capsys):
    assert command.plan(["--num-layers", "2"]) == 1
    assert "- megatron-core: --micro-batch-size is required" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", pytest.param("explain", marks=pytest.mark.long)])
def test_exit_codes_of_the_commands(command, flags):
    """As scripts see them; nothing but the plan is printed."""
    call = [sys.executable, "-m", "megatron_fsdp_cuda_graphs", command, *flags(DENSE, "--num-layers 2")]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(("The flags fit together.", "Pipeline stage 1 of 1"))
