"""Static inference with local graphs generates what eager inference does, logit for logit, on the CPU backend."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "trainings" / "static_inference.py"
LAYERS, BATCHES, DECODED = 3, 3, 18


@pytest.fixture(scope="module")
def generated():
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_tokens_and_logits_are_those_of_eager_inference(generated):
    assert len(generated["eager"]) == BATCHES * DECODED
    assert generated["graphed"] == generated["eager"]


def test_each_layer_has_one_graph_for_each_batch_size(generated):
    assert generated["graphs"] == LAYERS * 2


def test_layers_read_the_output_of_the_one_before_where_that_puts_it(generated):
    assert generated["shared_inputs"] == (LAYERS - 1) * 2
