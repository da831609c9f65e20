"""Test that ``--cuda-graph-report`` on GPUs lists graphs and memory."""

import json

from tests.support.pretraining.pretrain import BATCH, FLAGS, GRAPHS, SCRIPT
from tests.support.trainings.gpus import GPUS
from tests.support.trainings.launch import torchrun

LAYERS = 3  # number of layers in FLAGS
FLAGS_ON_GPUS = f"""
    {FLAGS.replace("--distributed-backend gloo", "--distributed-backend nccl")} {BATCH} {GRAPHS[True]} --mock-data
    --train-iters 4 --cuda-graph-warmup-steps 2 --cuda-graph-layers-per-graph 1
"""


def test_every_layer_has_graphs_in_one_pool(tmp_path):
    done = torchrun(SCRIPT, [*FLAGS_ON_GPUS.split(), "--cuda-graph-report", str(tmp_path)], GPUS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    report = json.loads((tmp_path / "capture.json").read_text())
    assert len(report["captured"]) == LAYERS
    for part in report["captured"]:
        assert part["graphs"] == {"forward": 1, "backward": 1, "weight-gradient": 0}
    (pool,) = report["pools"]
    assert pool["graphs"] == 2 * LAYERS and pool["bytes"] > 0
