"""Runs ``examples/pretrain_gpt.py`` on two ranks of the CPU backend, and returns its exact metrics."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .launch import OWN

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"
LAUNCH = "-m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_fsdp_cuda_graphs.cpu_backend"
FLAGS = """
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer
    --ckpt-format fsdp_dtensor --fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail
    --no-gradient-accumulation-fusion --distributed-backend gloo --no-persist-layer-norm --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-gradient-reduce-div-fusion
    --transformer-impl local --num-layers 3 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8
    --bf16 --attention-dropout 0.1 --hidden-dropout 0.1 --te-rng-tracker --seed 1234 --lr 1e-3
    --lr-decay-style constant --clip-grad 1.0 --tokenizer-type NullTokenizer --vocab-size 255
    --split 90,10,0 --eval-iters 0 --eval-interval 1000 --log-interval 1 --num-workers 0
"""
GRAPHS = {False: "--cuda-graph-impl none", True: "--cuda-graph-impl transformer_engine"}
TIMEOUT = 240  # seconds


class Pretraining:
    """A run that goes on in the background.

    Args:
        folder: An existing folder for its log and metrics.
        flags: Further flags, as one string.
        graphs: Whether layers are captured, after three steps unless ``flags`` say otherwise.
        data: The flags that name the data.

    Attributes:
        log: The file of all that it writes.
    """

    def __init__(self, folder: Path, flags: str, *, graphs: bool, data: str = "--mock-data"):
        self._metrics, self.log = folder / "metrics.jsonl", folder / "log"
        arguments = f"{LAUNCH} {SCRIPT} {FLAGS} {GRAPHS[graphs]} {data} {flags}"
        environment = os.environ | OWN | {"STEP_METRICS_PATH": str(self._metrics)}
        paths = [str(ROOT), os.environ.get("PYTHONPATH")]  # for --spec, which names modules
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with self.log.open("w") as log:
            command = [sys.executable, *arguments.split()]
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def steps(self) -> list[dict[str, Any]]:
        """Return the lines of ``step_metrics.StepMetrics`` so far."""
        lines = self._metrics.read_text().splitlines(keepends=True) if self._metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def terminate_after(self, steps: int) -> None:
        """Send SIGTERM to the launcher, which passes it on to the ranks, once ``steps`` are done."""
        end = time.monotonic() + TIMEOUT
        while len(self.steps()) < steps and self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        self._process.send_signal(signal.SIGTERM)

    def ended(self) -> int:
        """Wait for the end and return the exit status.

        Raises:
            AssertionError: it did not end; with the end of its log.
        """
        try:
            return self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
            raise AssertionError(f"no end after {TIMEOUT} s:\n{self.log_tail()}") from None

    def log_tail(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-6000:]


def pretrain(folder: Path, flags: str, *, graphs: bool, **data: str) -> list[dict[str, Any]]:
    """Run to the end and return the metrics of each step; see ``Pretraining``.

    Raises:
        AssertionError: it failed; with the end of its log.
    """
    folder.mkdir()
    run = Pretraining(folder, flags, graphs=graphs, **data)
    assert run.ended() == 0, run.log_tail()
    return run.steps()


def numbers(steps: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What must be equal between two runs: of each step its number, loss, gradient norm, and whether it was skipped."""
    return [tuple(step[key] for key in ("step", "loss_hex", "grad_norm_hex", "skipped")) for step in steps]
