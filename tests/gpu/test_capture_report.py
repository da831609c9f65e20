"""``--cuda-graph-report`` on GPUs: memory is in the report, and both engines capture the same passes."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.forked_ranks import OWN
from tests.support.gpus import ENGINES, GPUS
from tests.support.launch import TIMEOUT
from tests.support.pretrain import BATCH, FLAGS, GRAPHS, SCRIPT

LAYERS = 3  # of FLAGS
FLAGS_ON_GPUS = f"""
    {FLAGS.replace("--distributed-backend gloo", "--distributed-backend nccl")} {BATCH} {GRAPHS[True]} --mock-data
    --train-iters 4 --cuda-graph-warmup-steps 2 --cuda-graph-layers-per-graph 1
"""


@pytest.fixture(scope="module", params=ENGINES)
def report(request, tmp_path_factory):
    """The report of an engine."""
    folder = tmp_path_factory.mktemp(request.param)
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(GPUS),
                str(SCRIPT),
            ),
            *FLAGS_ON_GPUS.split(),
            *("--cuda-graph-report", str(folder)),
        ],
        env=os.environ | OWN | {"MEGATRON_CUDA_GRAPH_ENGINE": request.param},
        timeout=TIMEOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads((folder / "capture.json").read_text())
    assert found["engine"] == request.param
    return found


def test_memory_is_sampled_over_the_capture(report):
    samples = report["memory"]
    assert all(0 < sample["allocated"] <= sample["reserved"] for sample in samples)
    assert len([sample for sample in samples if sample["phase"] == "capture"]) == 2 * LAYERS


def test_passes_of_both_engines(report):
    layers = list(range(LAYERS))
    order = [(layer, "forward") for layer in layers] + [(layer, "backward") for layer in reversed(layers)]
    assert [(each["layer"], each["kind"]) for each in report["passes"]] == order
    assert all(layer["warm_up_seconds"] > 0 and layer["capture_seconds"] > 0 for layer in report["layers"])


def test_graphs_where_the_engine_shows_them(report):
    if report["engine"] == "native":
        assert report["graphs"] == {"forward": LAYERS, "backward": LAYERS, "weight_gradients": 0}
        (pool,) = report["pools"]
        assert pool["graphs"] == 2 * LAYERS and pool["bytes"] > 0
    else:
        assert report["graphs"] == {"forward": None, "backward": None, "weight_gradients": None}
        assert report["pools"] == []
