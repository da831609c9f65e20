"""A long training with graphs against an eager one, bit for bit: with evaluation, checkpoints, and a new process.

    python benchmarks/soak.py --output benchmarks/results/soak.json      # two GPUs; two CPU ranks where there is none

For each of ``--configurations`` it runs ``examples/pretrain_gpt.py`` under Megatron-FSDP three times: eagerly without
an interruption; with a graph per layer, saving checkpoints, to ``--resume-from``; and from that checkpoint in new
processes to the end. Loss and gradient norm of every step are compared bit for bit. The JSON has their hash, the steps
that differ, and the MiB that the allocator held after each step, which a picture beside it shows; ``flat`` says that
none was reserved in the second half of a run. Exits with 1 if steps differ, are missing, or ran without graphs, or if
memory grew.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from results_file import command_line, write_results

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "pretrain_gpt.py"
CAPTURED_AFTER = 3
COMMON = """
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer
    --ckpt-format fsdp_dtensor --fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail
    --no-gradient-accumulation-fusion --position-embedding-type rope --attention-dropout 0.1 --hidden-dropout 0.1
    --bf16 --te-rng-tracker --seed 1234 --lr 3e-4 --lr-decay-style constant --clip-grad 1.0 --num-attention-heads 4
    --micro-batch-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --split 90,10,0 --log-interval 1
    --num-workers 0 --eval-iters 2
"""
MOE = """
    --disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
"""
LOCAL = "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion"
ON_CPU = """
    --distributed-backend gloo --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-gradient-reduce-div-fusion
"""
EAGER = "--cuda-graph-impl none"
GRAPHED = f"--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps {CAPTURED_AFTER}"
GRAPHED_MOE = f"{GRAPHED} --cuda-graph-modules attn moe_router moe_preprocess"
Steps = list[dict[str, Any]]


def main() -> int:
    """Run every configuration; return the exit status."""
    args = parse()
    on_cpu = not torch.cuda.is_available()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.configurations:
            print(f"{name}:", flush=True)
            found[name] = soak(args, name, Path(folder) / name, on_cpu)
    write_results(args.output, command=command_line("benchmarks/soak.py", sys.argv[1:]), gpus=args.ranks, **found)
    draw(args.output.with_suffix(".png"), found)
    return int(any(each["differing_steps"] or each["without_graphs"] or not each["flat"] for each in found.values()))


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", nargs="+", choices=("dense", "moe"), default=("dense", "moe"))
    parser.add_argument("--output", type=Path, required=True, help="the JSON; the picture goes beside it")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000, help="of the dense model")
    parser.add_argument("--moe-steps", type=int, default=500)
    parser.add_argument("--evaluate-every", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=500, help="at most the steps to --resume-from")
    parser.add_argument("--resume-from", type=int, help="a step with a checkpoint; by default the middle")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128)
    return parser.parse_args()


def soak(args: argparse.Namespace, name: str, folder: Path, on_cpu: bool) -> dict[str, Any]:
    """Run one configuration and return what was found."""
    folder.mkdir()
    moe = name == "moe"
    steps = args.moe_steps if moe else args.steps
    middle = args.resume_from or steps // 2
    sizes = f"""
        --num-layers {args.layers} --hidden-size {args.hidden} --seq-length {args.sequence}
        --max-position-embeddings {args.sequence} --global-batch-size {2 * args.ranks}
        --train-iters {steps} --eval-interval {args.evaluate_every}
    """
    kinds = f"{LOCAL} {ON_CPU}" if on_cpu else LOCAL if not _has_transformer_engine() else _te_flags(moe)
    flags = f"{COMMON} {sizes} {kinds} {MOE if moe else ''}"
    graphed = GRAPHED_MOE if moe else GRAPHED
    checkpoints = f"--save {folder / 'checkpoints'} --save-interval {min(args.save_every, middle)}"
    runs = {
        "eager": f"{flags} {EAGER}",
        "graphed": f"{flags} {graphed} {checkpoints} --exit-interval {middle}",
        "resumed": f"{flags} {graphed} {checkpoints} --load {folder / 'checkpoints'} --ckpt-step {middle}",
    }
    done = {run: train(folder / run, flags, args.ranks, on_cpu) for run, flags in runs.items()}
    return compare(steps, middle, done)


def train(folder: Path, flags: str, ranks: int, on_cpu: bool) -> Steps:
    """Train in new processes; return the metrics of each step (``examples/step_metrics.py``).

    Raises:
        RuntimeError: a process failed; with the end of the log.
    """
    folder.mkdir()
    metrics, log = folder / "metrics.jsonl", folder / "log"
    backend = "-m megatron_fsdp_cuda_graphs.cpu_backend" if on_cpu else ""
    launch = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} {backend} {SCRIPT} {flags}"
    environment = os.environ | {
        "STEP_METRICS_PATH": str(metrics),
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # one hardware queue would serialize FSDP's collectives
    with log.open("w") as file:
        ended = subprocess.run(
            [sys.executable, *launch.split()], stdout=file, stderr=file, env=environment, check=False
        )
    if ended.returncode:
        raise RuntimeError(f"{folder.name} failed:\n{log.read_text(errors='replace')[-6000:]}")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    print(f"  {folder.name}: {len(steps)} steps", flush=True)
    return steps


def compare(steps: int, middle: int, done: dict[str, Steps]) -> dict[str, Any]:
    """Return how the interrupted graphed run differs from the eager one, and the memory of all."""
    eager, graphed = _numbers(done["eager"]), _numbers(done["graphed"] + done["resumed"])
    early = {run: middle * (run == "resumed") + CAPTURED_AFTER for run in ("graphed", "resumed")}
    memory = {run: [each["reserved_mib"] for each in lines] for run, lines in done.items()}
    return {
        "steps": steps,
        "resumed_after": middle,
        "sha256_eager": _hash(eager),
        "sha256_graphed": _hash(graphed),
        "differing_steps": [n for n in range(1, steps + 1) if n not in eager or eager[n] != graphed.get(n)],
        "without_graphs": [
            each["step"]
            for run, first in early.items()
            for each in done[run]
            if each["step"] > first and not each["graphs"]
        ],
        "flat": all(max(mib) == max(mib[: len(mib) // 2]) for mib in memory.values()),
        "grown_since_step_10_mib": {run: mib[-1] - mib[min(9, len(mib) - 1)] for run, mib in memory.items()},
        "reserved_mib": memory,
    }


def draw(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """Draw the memory of each run over its steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(found), 1, squeeze=False, figsize=(9, 3 * len(found)))
    for axis, (name, each) in zip(axes[:, 0], found.items(), strict=True):
        for run, mib in each["reserved_mib"].items():
            first = 1 + each["resumed_after"] * (run == "resumed")
            axis.plot(range(first, first + len(mib)), mib, label=run)
        equal = "bit-equal" if not each["differing_steps"] else f"{len(each['differing_steps'])} steps differ"
        axis.set_title(f"{name}: {each['steps']} steps, {equal}", fontsize=10)
        axis.set_xlabel("step")
        axis.set_ylabel("reserved MiB")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _numbers(steps: Steps) -> dict[int, tuple[str, str, bool]]:
    return {each["step"]: (each["loss_hex"], each["grad_norm_hex"], each["skipped"]) for each in steps}


def _hash(numbers: dict[int, tuple[str, str, bool]]) -> str:
    return hashlib.sha256(json.dumps(sorted(numbers.items())).encode()).hexdigest()


def _has_transformer_engine() -> bool:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return True


def _te_flags(moe: bool) -> str:
    flags = "--transformer-impl transformer_engine --no-create-attention-mask-in-dataloader"
    return f"{flags} --moe-grouped-gemm" if moe else flags


if __name__ == "__main__":
    raise SystemExit(main())
