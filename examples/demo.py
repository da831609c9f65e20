"""Train the same small GPT twice under Megatron-FSDP, eagerly and with CUDA graphs, and compare the runs.

Runs one rank per GPU, on at most two GPUs, or two ranks on the CPU backend without a GPU. Writes the dataset, logs,
metrics and a plot to the output folder. Exits with 1 unless graphs were captured and all losses and gradient norms are
bit-identical.

    python examples/demo.py
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import prepare_text
import torch
from demo_report import Run, Step, failures, plot, read_steps, summary, table

EXAMPLES = Path(__file__).resolve().parent
STALL_SECONDS = 300  # time limit for a step
LOG_LINES = 25  # lines printed from the log of a failed run

FSDP = """
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer
    --ckpt-format fsdp_dtensor --fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail
    --no-gradient-accumulation-fusion
"""
TRAINING = """
    --bf16 --position-embedding-type rope --attention-dropout 0.1 --hidden-dropout 0.1
    --te-rng-tracker --seed 1234 --lr-decay-style constant --clip-grad 1.0
    --split 95,5,0 --eval-iters 0 --eval-interval 1000 --log-interval 1 --num-workers 0
"""
GRAPH_WARMUP_STEPS = 3
GRAPHED = f"--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps {GRAPH_WARMUP_STEPS}"
EAGER = "--cuda-graph-impl none"


@dataclass(frozen=True)
class Setup:
    """Device and model of the demo."""

    place: str
    ranks: int
    launch: tuple[str, ...]  # arguments of torchrun before the script
    flags: str
    steps: int
    note: str = ""


def on_gpus(ranks: int) -> Setup:
    """Return the setup for GPUs: a model small enough to be host-bound."""
    try:
        import transformer_engine.pytorch  # noqa: F401

        layers = "transformer_engine"
    except ImportError:
        layers = "local --no-persist-layer-norm --no-masked-softmax-fusion"
    flags = f"""
        --transformer-impl {layers} --num-layers 8 --hidden-size 1024 --num-attention-heads 16
        --seq-length 512 --max-position-embeddings 512 --micro-batch-size 2 --global-batch-size {4 * ranks} --lr 3e-4
    """
    name = torch.cuda.get_device_name()
    return Setup(f"{ranks} x {name}, {layers.split()[0]} layers", ranks, (), flags, steps=40)


def on_the_cpu_backend() -> Setup:
    """Return the setup for the CPU backend: a model that two CPU cores train in seconds."""
    flags = """
        --transformer-impl local --num-layers 4 --hidden-size 128 --num-attention-heads 4
        --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3
        --distributed-backend gloo --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion
        --no-bias-dropout-fusion --no-rope-fusion --no-gradient-reduce-div-fusion
    """
    note = "The CPU backend verifies numerics; its times do not predict times on GPUs."
    launch = ("-m", "megatron_fsdp_cuda_graphs.cpu_backend")
    return Setup("CPU backend, 2 gloo ranks", 2, launch, flags, steps=20, note=note)


def choose(device: str) -> Setup:
    """Return the setup for ``device``: 'gpu', 'cpu' or 'auto'.

    Raises:
        SystemExit: ``device`` is 'gpu' and torch finds none.
    """
    gpus = torch.cuda.device_count()
    if device == "gpu" and not gpus:
        raise SystemExit("--device gpu: torch finds no GPU: use --device cpu")
    return on_gpus(min(gpus, 2)) if gpus and device != "cpu" else on_the_cpu_backend()


def prepare(prefix: Path) -> None:
    """Build the dataset unless its index exists; the index is written last.

    Raises:
        SystemExit: Building failed.
    """
    if prefix.with_suffix(".idx").exists():
        return
    print("Preparing the text: sources of Python's standard library, one token per byte", flush=True)
    command = [
        sys.executable,
        str(EXAMPLES / "prepare_text.py"),
        "--output-prefix",
        str(prefix),
        "--max-megabytes",
        "4",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\nThe text could not be prepared: exit code {done.returncode}")
    print("".join(f"  {line}\n" for line in done.stdout.splitlines()[:-1]), end="", flush=True)


def train(setup: Setup, name: str, flags: str, steps: int, data: Path, output: Path) -> Run:
    """Train once with torchrun, print each finished step, and return the run.

    Raises:
        SystemExit: Training failed or stalled.
    """
    metrics, log = output / f"{name}.jsonl", output / f"{name}.log"
    metrics.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(setup.ranks)]
    command += [*setup.launch, str(EXAMPLES / "pretrain_gpt.py"), *f"{setup.flags} {FSDP} {TRAINING} {flags}".split()]
    command += ["--train-iters", str(steps), "--data-path", str(data)]
    command += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(prepare_text.VOCAB_SIZE)]
    environment = {**os.environ, "STEP_METRICS_PATH": str(metrics)}
    # Makes cuDNN's attention backward deterministic.
    environment.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    # One hardware queue would serialize FSDP's collectives and the kernels of layers.
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)

    print(f"Training {name}: {setup.place} (log: {log})", flush=True)

    def show(step: Step) -> None:
        time_taken = "" if step.ms is None else f"  {step.ms:8.1f} ms"
        graphs = f"  {step.graphs} graphs" if step.graphs else ""
        print(f"  {name} step {step.step:3d}/{steps}  loss {step.loss:.4f}{time_taken}{graphs}", flush=True)

    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            problem = follow(process, metrics, show)
        finally:
            process.terminate()  # no-op after exit; torchrun forwards it to its workers
            process.wait()
    if problem:
        raise SystemExit(f"{excerpt(log)}\nTraining {name} failed: {problem}; the whole log is in {log}")
    return Run.read(name, metrics)


def excerpt(log: Path) -> str:
    """Return the last lines of the tracebacks in a log; without any, the last lines of the log."""
    lines = log.read_text(errors="replace").splitlines()
    exceptions = [line for line in lines if line.startswith("[rank")]
    return "\n".join((exceptions or lines)[-LOG_LINES:])


def follow(process: subprocess.Popen, metrics: Path, show: Callable[[Step], None]) -> str | None:
    """Show new steps until the process ends; return an error message, or None on success."""
    shown, last_news = 0, time.monotonic()
    while True:
        ended = process.poll() is not None
        steps = read_steps(metrics)
        for step in steps[shown:]:
            show(step)
            last_news = time.monotonic()
        shown = len(steps)
        if ended:
            return f"exit code {process.returncode}" if process.returncode else None
        if time.monotonic() - last_news > STALL_SECONDS:
            return f"no new step in {STALL_SECONDS} seconds"
        time.sleep(0.2)


def conclude(eager: Run, graphed: Run, steps: int, picture: Path, title: str) -> int:
    """Print the table, write the plot, and return the exit code: 1 if a check failed."""
    print(f"\n{title}\n\n{table(eager, graphed)}")
    plot(eager, graphed, picture, title)
    print(f"plot                   {picture}")
    found = failures(eager, graphed, steps)
    for sentence in found:
        print(f"FAILED: {sentence}")
    if not found:
        print("PASSED: with graphs, every loss and gradient norm is bit-identical to the eager run")
    return 1 if found else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=EXAMPLES.parent / "demo-output", help="folder for all files")
    parser.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="JSON file for the summary")
    parser.add_argument("--steps", type=int, help="training steps of each run (default: 40 on GPUs, 20 on the CPU)")
    options = parser.parse_args(arguments)
    setup = choose(options.device)
    steps = setup.steps if options.steps is None else options.steps
    if steps <= GRAPH_WARMUP_STEPS:
        parser.error(f"argument --steps: graphs are captured after {GRAPH_WARMUP_STEPS} steps; pass more than {steps}")
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    data = output / "stdlib"
    prepare(data)
    eager = train(setup, "eager", EAGER, steps, data, output)
    graphed = train(setup, "graphed", GRAPHED, steps, data, output)
    title = f"GPT under Megatron-FSDP, eager and with CUDA graphs: {setup.place}"
    code = conclude(eager, graphed, steps, output / "demo.png", title)
    if options.json:
        options.json.write_text(
            json.dumps({"command": "make demo", "hardware": setup.place, **summary(eager, graphed)})
        )
    if setup.note:
        print(setup.note)
    return code


if __name__ == "__main__":
    sys.exit(main())
