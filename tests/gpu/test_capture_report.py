"""Test that ``--cuda-graph-report`` on GPUs lists graphs and memory."""

import json

import pytest

from tests.support.pretraining.pretrain import BATCH, FLAGS, GRAPHS, SCRIPT
from tests.support.trainings.gpus import GPUS
from tests.support.trainings.launch import torchrun

LAYERS = 3  # number of layers in FLAGS
FLAGS_ON_GPUS = f"""
    {FLAGS.replace("--distributed-backend gloo", "--distributed-backend nccl")} {BATCH} {GRAPHS[True]} --mock-data
    --train-iters 4 --cuda-graph-warmup-steps 2 --cuda-graph-layers-per-graph 1
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return the report of a run with one graph per layer."""
    folder = tmp_path_factory.mktemp("report")
    done = torchrun(SCRIPT, [*FLAGS_ON_GPUS.split(), "--cuda-graph-report", str(folder)], GPUS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((folder / "capture.json").read_text())


def test_every_layer_has_graphs(report):
    assert len(report["captured"]) == LAYERS
    for part in report["captured"]:
        assert part["graphs"] == {"forward": 1, "backward": 1, "weight-gradient": 0}


def test_pool_holds_all_graphs(report):
    (pool,) = report["pools"]
    assert pool["graphs"] == 2 * LAYERS and pool["bytes"] > 0
