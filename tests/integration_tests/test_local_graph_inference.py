"""Test that static inference with local graphs is bit-identical to eager, on the CPU backend."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "trainings" / "static_inference.py"
LAYERS, BATCHES, DECODED = 3, 3, 18


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def generated():
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_tokens_and_logits_are_bit_identical_to_eager(generated):
    assert len(generated["eager"]) == BATCHES * DECODED
    assert generated["graphed"] == generated["eager"]


def test_each_layer_has_one_graph_for_each_batch_size(generated):
    assert generated["graphs"] == LAYERS * 2


def test_layers_read_outputs_of_the_previous_layer_in_place(generated):
    assert generated["shared_inputs"] == (LAYERS - 1) * 2
