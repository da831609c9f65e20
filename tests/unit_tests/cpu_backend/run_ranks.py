"""Starts a script of this folder on gloo ranks, on the CPU backend."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def on_two_ranks(script: str, *arguments: str, timeout: int) -> subprocess.CompletedProcess:
    """Run ``script`` under torchrun and the launcher; the output of both ranks comes back together."""
    return on_ranks(2, script, *arguments, timeout=timeout)


def on_ranks(count: int, script: str, *arguments: str, timeout: int) -> subprocess.CompletedProcess:
    """Run ``script`` on ``count`` ranks; see ``on_two_ranks``."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)),
            *("-m", "megatron_fsdp_cuda_graphs.cpu_backend", str(HERE / script), *arguments),
        ],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
