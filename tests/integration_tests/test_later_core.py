"""A megatron-core that was not tested, with what is known of 0.20: refused, or trained with where the user says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.linked_core import later_core

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
HOOKS = Path(__file__).parents[1] / "unit_tests" / "core" / "distributed" / "test_fsdp_hook_registration.py"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its demo trains on the CPU backend")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return later_core(tmp_path_factory.mktemp("core"))


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the megatron-core in ``folder``."""
    environment = {**os.environ, "PYTHONPATH": str(folder), **variables}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=1800)


def test_it_is_refused(folder):
    done = run(folder, "-c", "import megatron.core")
    assert done.returncode == 1
    assert "found 0.20.2" in done.stderr


def test_the_first_version_of_the_wrapper_is_ours_and_the_second_megatron_cores(folder):
    code = """
import inspect
from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
print([getattr(adapter, f"FullyShardedDataParallel{version}").__init__.__qualname__ for version in ("", "V1", "V2")])
print(inspect.getsourcefile(adapter.FullyShardedDataParallelV1))
"""
    done = run(folder, "-c", code, MEGATRON_FSDP_CUDA_GRAPHS="untested")
    assert done.returncode == 0, done.stderr
    names, file = done.stdout.splitlines()
    assert names == str(
        ["_BaseDataParallel.__init__", "FullyShardedDataParallel.__init__", "_BaseDataParallel.__init__"]
    )
    assert not file.startswith(str(folder))


@pytest.mark.long
def test_hooks_are_those_that_it_registers(folder):
    done = run(folder, "-m", "pytest", "-q", str(HOOKS), MEGATRON_FSDP_CUDA_GRAPHS="untested")
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_the_demo_trains_with_the_bits_of_eager_training(folder, tmp_path):
    demo = [str(DEMO), "--device", "cpu", "--steps", "6", "--output", str(tmp_path)]
    done = run(folder, *demo, MEGATRON_FSDP_CUDA_GRAPHS="untested")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
    assert "found 0.20.2" in (tmp_path / "graphed.log").read_text()
