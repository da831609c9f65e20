"""Test ``--cuda-graph-report`` of ``examples/pretrain_gpt.py`` on two CPU ranks."""

import json

import pytest

from tests.support.pretraining.pretrain import numbers, pretrain
from tests.support.sample import mostly_long

LAYERS = 3  # number of layers in tests.support.pretraining.pretrain.FLAGS
QUICK = ("--cuda-graph-layers-per-graph 1",)
TRAIN = "--train-iters 4 --cuda-graph-warmup-steps 2"


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return pretrain(tmp_path_factory.mktemp("eager") / "run", TRAIN, graphs=False)


@pytest.mark.parametrize(
    "flag", mostly_long((f"--cuda-graph-layers-per-graph {count}" for count in ("all", "1", "model")), *QUICK)
)
def test_report_matches_the_training(flag, eager, tmp_path):
    folder = tmp_path / "new" / "report"
    steps = pretrain(tmp_path / "run", f"{TRAIN} {flag} --cuda-graph-report {folder}", graphs=True)
    assert numbers(steps) == numbers(eager)
    assert sorted(file.name for file in folder.iterdir()) == ["capture.json"]
    report = json.loads((folder / "capture.json").read_text())

    whole_model, apart = flag.endswith("model"), flag.endswith("1")
    layers = [f"layer {number} (TransformerLayer)" for number in range(1, LAYERS + 1)]
    expected = [["the whole model"]] if whole_model else [[layer] for layer in layers] if apart else [layers]
    assert [part["names"] for part in report["captured"]] == expected
    for part in report["captured"]:
        assert part["graphs"] == {"forward": 1, "backward": 1, "weight-gradient": 0}
    # One all-gather and one reduction per layer; for the whole model, one all-gather of parameters outside layers.
    assert report["collectives"] == (2 * LAYERS if apart else int(whole_model))

    log = (tmp_path / "run" / "log").read_text()
    assert log.count("Captured CUDA graphs in ") == 1
    for part in report["eager"]:
        assert part["what"] in log and f"because {part['why']}" in log
