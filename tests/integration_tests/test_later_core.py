"""Test that an untested megatron-core, with the known changes of 0.20, stays unpatched unless the user opts in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.linked_core import later_core

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
HOOKS = Path(__file__).parents[1] / "unit_tests" / "core" / "distributed" / "test_fsdp_hook_registration.py"
SHARDED = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --train-iters 2 --lr 1e-4 --bf16 --transformer-impl local --no-persist-layer-norm "
    "--no-masked-softmax-fusion --no-rope-fusion --no-gradient-accumulation-fusion --use-megatron-fsdp "
    "--data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer --ckpt-format fsdp_dtensor"
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the demo trains on the CPU backend"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return later_core(tmp_path_factory.mktemp("core"))


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the megatron-core in ``folder``."""
    environment = {**os.environ, "PYTHONPATH": str(folder), **variables}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=1800)


def start(folder: Path, tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Parse and validate ``flags`` as a training run does."""
    script = tmp_path / "start.py"
    script.write_text(
        "from megatron.training.arguments import parse_args, validate_args\nvalidate_args(parse_args())\n"
    )
    return run(folder, "-m", "megatron_fsdp_cuda_graphs.cpu_backend", str(script), *SHARDED.split(), *flags)


def test_imports_are_unpatched(folder):
    code = """
import importlib.util, megatron.core.transformer.cuda_graphs as cuda_graphs
print(importlib.util.find_spec("megatron.core").origin, cuda_graphs.__file__, sep="\\n")
"""
    done = run(folder, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(folder / "megatron/core" / file) for file in ("__init__.py", "transformer/cuda_graphs.py")
    ]


def test_training_without_graphs_starts_with_a_warning(folder, tmp_path):
    done = start(folder, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("It is left unpatched, so models under FSDP get no CUDA graphs") == 1


def test_graphs_under_megatron_fsdp_are_refused(folder, tmp_path):
    done = start(folder, tmp_path, "--cuda-graph-impl", "transformer_engine")
    assert done.returncode == 1
    assert "transformer_engine needs the patch, which is off" in done.stderr.splitlines()[-1]


def test_opting_in_replaces_the_first_version_of_the_wrapper(folder):
    code = """
import inspect
from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
print([getattr(adapter, f"FullyShardedDataParallel{version}").__init__.__qualname__ for version in ("", "V1", "V2")])
print(adapter.FullyShardedDataParallelV1.__name__)
"""
    done = run(folder, "-c", code, MEGATRON_FSDP_CUDA_GRAPHS="untested")
    assert done.returncode == 0, done.stderr
    names, file = done.stdout.splitlines()
    assert names == str(
        ["_BaseDataParallel.__init__", "FullyShardedDataParallel.__init__", "_BaseDataParallel.__init__"]
    )
    assert not file.startswith(str(folder))


def test_hooks_match_those_of_megatron_core(folder):
    done = run(folder, "-m", "pytest", "-q", str(HOOKS), MEGATRON_FSDP_CUDA_GRAPHS="untested")
    assert done.returncode == 0, done.stdout


def test_demo_is_bit_identical_to_eager(folder, tmp_path):
    demo = [str(DEMO), "--device", "cpu", "--steps", "6", "--output", str(tmp_path)]
    done = run(folder, *demo, MEGATRON_FSDP_CUDA_GRAPHS="untested")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
    assert "found 0.20.2" in (tmp_path / "graphed.log").read_text()
