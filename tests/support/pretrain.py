"""Runs ``examples/pretrain_gpt.py`` on two ranks of the CPU backend, and returns its exact metrics.

The ranks are forked from a process that has imported everything, which takes longer than a short training. ``make
demo`` starts the script with torchrun.
"""

import json
import os
import runpy
import signal
import socket
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from torch.multiprocessing import start_processes

from .launch import OWN

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
PRELOADED = "tests.support.preloaded"
RANKS = 2
FLAGS = """
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer
    --ckpt-format fsdp_dtensor --fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail
    --no-gradient-accumulation-fusion --distributed-backend gloo --no-persist-layer-norm --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-gradient-reduce-div-fusion
    --transformer-impl local --num-layers 3 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2
    --bf16 --attention-dropout 0.1 --hidden-dropout 0.1 --te-rng-tracker --seed 1234 --lr 1e-3
    --lr-decay-style constant --clip-grad 1.0 --tokenizer-type NullTokenizer --vocab-size 255
    --split 90,10,0 --eval-iters 0 --eval-interval 1000 --log-interval 1 --num-workers 0
"""
BATCH = "--global-batch-size 8"
SCHEDULE = "--step-batch-size-schedule"  # in the place of BATCH, where flags have it
GRAPHS = {False: "--cuda-graph-impl none", True: "--cuda-graph-impl transformer_engine"}
TIMEOUT = 240  # seconds
GRACE = 30  # seconds


class Pretraining:
    """A run that goes on in the background.

    Args:
        folder: An existing folder for its log and metrics.
        flags: Further flags, as one string.
        graphs: Whether layers are captured, after three steps unless ``flags`` say otherwise.
        data: The flags that name the data.
        script: What the ranks run.

    Attributes:
        log: The file of all that it writes.
    """

    def __init__(self, folder: Path, flags: str, *, graphs: bool, data: str = "--mock-data", script: Path = SCRIPT):
        self._metrics, self.log = folder / "metrics.jsonl", folder / "log"
        batch = "" if SCHEDULE in flags else BATCH
        self.log.touch()
        arguments = f"{script} {FLAGS} {batch} {GRAPHS[graphs]} {data} {flags}".split()
        context = get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        environment = os.environ | OWN | {"STEP_METRICS_PATH": str(self._metrics)}
        self._process = context.Process(target=_launch, args=(arguments, environment, self.log))
        with mock.patch.dict(os.environ, OWN):  # the server starts with the first process, and imports by them
            self._process.start()

    def steps(self) -> list[dict[str, Any]]:
        """Return the lines of ``step_metrics.StepMetrics`` so far."""
        lines = self._metrics.read_text().splitlines(keepends=True) if self._metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def terminate_after(self, steps: int) -> None:
        """Send SIGTERM to the launcher, which passes it on to the ranks, once ``steps`` are done."""
        end = time.monotonic() + TIMEOUT
        while len(self.steps()) < steps and self._process.is_alive() and time.monotonic() < end:
            time.sleep(0.01)
        self._process.terminate()

    def ended(self) -> int:
        """Wait for the end and return the exit status.

        Raises:
            AssertionError: it did not end; with the end of its log.
        """
        self._process.join(TIMEOUT)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()
            raise AssertionError(f"no end after {TIMEOUT} s:\n{self.log_tail()}")
        assert self._process.exitcode is not None
        return self._process.exitcode

    def log_tail(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-6000:]


def _launch(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """Start the ranks, pass SIGTERM on to them (and SIGKILL after ``GRACE``), and wait for their end.

    Raises:
        ProcessExitedException: a rank failed; names its exit status.
    """
    with log.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    os.environ.clear()
    os.environ |= environment | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    ranks = start_processes(_rank, (arguments,), nprocs=RANKS, join=False, start_method="fork")

    def end(number: int, frame: object) -> None:
        for process in ranks.processes:
            process.terminate() if number == signal.SIGTERM else process.kill()
        signal.alarm(GRACE)

    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, end)
    while not ranks.join():
        pass


def _rank(rank: int, arguments: list[str]) -> None:
    """Be one of the ranks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    sys.argv = ["", *arguments]
    runpy.run_module("megatron_fsdp_cuda_graphs.cpu_backend", run_name="__main__", alter_sys=True)


def pretrain(folder: Path, flags: str, *, graphs: bool, **others: Any) -> list[dict[str, Any]]:
    """Run to the end and return the metrics of each step; see ``Pretraining``.

    Raises:
        AssertionError: it failed; with the end of its log.
    """
    folder.mkdir()
    run = Pretraining(folder, flags, graphs=graphs, **others)
    assert run.ended() == 0, run.log_tail()
    return run.steps()


def numbers(steps: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What must be equal between two runs: of each step its number, loss, gradient norm, and whether it was skipped."""
    return [tuple(step[key] for key in ("step", "loss_hex", "grad_norm_hex", "skipped")) for step in steps]
