"""``--cuda-graph-report`` of ``examples/pretrain_gpt.py``, on two CPU ranks: the report fits the model that trained."""

import json

import pytest

from tests.support.pretrain import FLAGS, numbers, pretrain
from tests.support.sample import mostly_long

LAYERS, HIDDEN, SEQUENCE, MICRO_BATCH = 3, 64, 32, 2  # of FLAGS
BYTES = 2  # of a bf16 number
FSDP_HOOKS = {"forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks"}
QUICK = ("--cuda-graph-layers-per-graph 1", "--cuda-graph-layers-per-graph model")
TRAIN = "--train-iters 4 --cuda-graph-warmup-steps 2"


def test_the_sizes_are_those_of_the_flags():
    assert f"--num-layers {LAYERS} --hidden-size {HIDDEN}" in FLAGS
    assert f"--seq-length {SEQUENCE} " in FLAGS and f"--micro-batch-size {MICRO_BATCH}\n" in FLAGS


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return pretrain(tmp_path_factory.mktemp("eager") / "run", TRAIN, graphs=False)


@pytest.fixture(
    scope="module",
    params=mostly_long((f"--cuda-graph-layers-per-graph {count}" for count in ("all", "1", "model")), *QUICK),
)
def reported(request, eager, tmp_path_factory):
    """A training with graphs: the flag, its report, its page and its log."""
    folder = tmp_path_factory.mktemp("graphs")
    flags = f"{TRAIN} {request.param} --cuda-graph-report {folder / 'new' / 'report'}"
    steps = pretrain(folder / "run", flags, graphs=True)
    assert numbers(steps) == numbers(eager)
    files = sorted((folder / "new" / "report").iterdir())
    assert [file.name for file in files] == ["capture.html", "capture.json"]
    page, data = (file.read_text() for file in files)
    return request.param, json.loads(data), page, (folder / "run" / "log").read_text()


def test_graphs(reported):
    flag, report, _, _ = reported
    whole_model, apart = flag.endswith("model"), flag.endswith("1")
    expected = LAYERS if apart else 1
    assert report["whole_model"] is whole_model
    assert report["graphs"] == {"forward": expected, "backward": expected, "weight_gradients": 0}
    assert [layer["name"] for layer in report["layers"]] == [
        f"layer {number} (TransformerLayer)" for number in range(1, 1 + (0 if whole_model else LAYERS))
    ]
    # An all-gather and a reduction of each layer; for the whole model an all-gather of what is outside of layers.
    assert report["collectives"] == (2 * LAYERS if apart else int(whole_model))


def test_passes(reported):
    flag, report, _, _ = reported
    layers = [None] if flag.endswith("model") else [0] if flag.endswith("all") else list(range(LAYERS))
    order = [(layer, "forward") for layer in layers] + [(layer, "backward") for layer in reversed(layers)]
    assert [(each["layer"], each["kind"]) for each in report["passes"]] == order
    assert report["seconds"]["waiting"] > 0  # two ranks vote


def test_hooks(reported):
    flag, report, _, _ = reported
    layers = [] if flag.endswith("model") else range(LAYERS)
    of_fsdp = [(hook["layer"], hook["route"]) for hook in report["hooks"] if hook["hook"].startswith("FsdpHooks.")]
    if flag.endswith("all"):
        assert {*of_fsdp} == {(layer, "recorded") for layer in layers}
    else:
        assert sorted(of_fsdp) == sorted((layer, route) for layer in layers for route in FSDP_HOOKS)


def test_static_inputs(reported):
    flag, report, _, _ = reported
    hidden = [each for each in report["static_inputs"] if each["name"] == "hidden_states"]
    count = 0 if flag.endswith("model") else LAYERS if flag.endswith("1") else 1
    assert [each["bytes"] for each in hidden] == [SEQUENCE * MICRO_BATCH * HIDDEN * BYTES] * count


def test_page_and_log(reported):
    flag, report, page, log = reported
    assert page.count("<svg") == (1 if flag.endswith("model") else 2)
    assert page.count("micro-batch 0, forward: ") == (LAYERS if flag.endswith("1") else 1)
    assert log.count("CUDA graphs, native engine, rank 0:") == 1
    for part in report["eager"]:
        assert part["what"] in log and f"because {part['why']}" in log
