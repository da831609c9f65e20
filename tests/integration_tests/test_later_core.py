"""Test that an untested megatron-core stays unpatched unless the user opts in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.linked_core import change, linked_core

SHARDED = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --train-iters 2 --lr 1e-4 --bf16 --transformer-impl local --no-persist-layer-norm "
    "--no-masked-softmax-fusion --no-rope-fusion --no-gradient-accumulation-fusion --use-megatron-fsdp "
    "--data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer --ckpt-format fsdp_dtensor"
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(torch.cuda.is_available(), reason="starts on the CPU backend"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = linked_core(tmp_path_factory.mktemp("core"))
    change(folder, "megatron/core/package_info.py", ("MINOR = 19", "MINOR = 20"))
    return folder


def start(folder: Path, tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Parse and validate ``flags`` like a training run that uses the megatron-core in ``folder``."""
    script = tmp_path / "start.py"
    script.write_text(
        "from megatron.training.arguments import parse_args, validate_args\nvalidate_args(parse_args())\n"
    )
    command = [sys.executable, "-m", "megatron_fsdp_cuda_graphs.cpu_backend", str(script), *SHARDED.split(), *flags]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)


def test_training_without_graphs_starts_with_a_warning(folder, tmp_path):
    done = start(folder, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("It is left unpatched, so models under FSDP get no CUDA graphs") == 1


def test_graphs_under_megatron_fsdp_are_refused(folder, tmp_path):
    done = start(folder, tmp_path, "--cuda-graph-impl", "transformer_engine")
    assert done.returncode == 1
    assert "transformer_engine needs the patch, which is off" in done.stderr.splitlines()[-1]
