"""Run ``examples/pretrain_gpt.py`` on forked ranks of the CPU backend and return its exact metrics."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.documents import write_documents
from tests.support.ranks.forked_ranks import ForkedRanks

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "pretrain_gpt.py"
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
SCHEDULE = "--step-batch-size-schedule"  # replaces BATCH
FP16 = "--fp16"  # replaces --bf16
GRAPHS = {False: "--cuda-graph-impl none", True: "--cuda-graph-impl transformer_engine"}
TIMEOUT = 900  # seconds


class Pretraining:
    """A pretraining run in the background.

    Args:
        folder: Existing folder for the log and metrics.
        flags: Additional flags, as one string.
        graphs: Use CUDA graphs, captured after three steps by default.
        data: Path of a dataset without a suffix; None to write a few documents to ``folder``.
        script: Script that the ranks run.
        base: Flags that precede ``BATCH`` and ``flags``; if empty, ``BATCH`` is omitted as well.
        ranks: Number of processes.
        launch: ``ForkedRanks``, or a class with the same interface.

    Attributes:
        log: Path of the output.
    """

    def __init__(
        self,
        folder: Path,
        flags: str,
        *,
        graphs: bool,
        data: Path | None = None,
        script: Path = SCRIPT,
        base: str = FLAGS,
        ranks: int = 2,
        launch: Callable[..., Any] = ForkedRanks,
    ) -> None:
        # Shuffling mock data takes longer than a short run.
        data = data or write_documents(folder / "documents")
        self._metrics, self.log = folder / "metrics.jsonl", folder / "log"
        batch = BATCH if base and SCHEDULE not in flags else ""
        common = base.replace("--bf16", "") if FP16 in flags else base
        arguments = f"{script} {common} {batch} {GRAPHS[graphs]} --data-path {data} {flags}".split()
        self._ranks = launch(arguments, self.log, ranks, {"STEP_METRICS_PATH": str(self._metrics)})

    def steps(self) -> list[dict[str, Any]]:
        """Return the metrics of the steps finished so far."""
        return steps_in(self._metrics)

    def ended(self) -> int:
        """Wait for the run and return the exit status.

        Raises:
            AssertionError: The run timed out. The message includes the end of the log.
        """
        return self._ranks.ended(TIMEOUT)

    def log_tail(self) -> str:
        """Return the end of the log."""
        return self._ranks.log_tail()


def steps_in(metrics: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a ``step_metrics.StepMetrics`` file, which may not exist yet."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def pretrain(folder: Path, flags: str, *, graphs: bool, **others: Any) -> list[dict[str, Any]]:
    """Run to completion and return the metrics of each step; see ``Pretraining`` for the arguments.

    Raises:
        AssertionError: The run failed. The message includes the end of the log.
    """
    folder.mkdir()
    run = Pretraining(folder, flags, graphs=graphs, **others)
    assert run.ended() == 0, run.log_tail()
    return run.steps()


def numbers(steps: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the number, loss, gradient norm and skip flag of each step, to compare runs."""
    return [tuple(step[key] for key in ("step", "loss_hex", "grad_norm_hex", "skipped")) for step in steps]
