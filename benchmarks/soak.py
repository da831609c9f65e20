"""Compare long training runs with and without graphs bit for bit, with evaluation, checkpoints and a restart.

    python benchmarks/soak.py --output soak.json      # two GPUs, or two CPU ranks

For each of ``--configurations``, runs ``examples/pretrain_gpt.py`` under Megatron-FSDP three times: eagerly; with
graphs and checkpoints up to ``--resume-from``; and from that checkpoint to the end in new processes. Compares the loss
and gradient norm of every step. The JSON has hashes of the eager and the graphed values, the differing steps, and each
run's reserved MiB per step; ``flat`` is true if no run reserved more memory in its second half. The exit code is 1
if steps differ or are missing, if graphs were not used, if memory grew, or if a run failed.

Independent runs are concurrent if there are enough GPUs, or with ``--at-once``. Results are written after each
configuration, and logs and metrics to a folder next to the JSON.
"""

import argparse
import hashlib
import json
import signal
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from _soak.trainings import Steps, Trainings, gpus
from results_file import command_line, write_results

CAPTURED_AFTER = 3
PROGRESS_EVERY = 10  # seconds
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
# Each micro-batch draws its popular experts; some experts receive no tokens.
UNBALANCED = "--moe-use-grouped-tensor --moe-router-force-biased 3"
LOCAL = "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion"
ON_CPU = """
    --distributed-backend gloo --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-gradient-reduce-div-fusion
"""
EAGER = "--cuda-graph-impl none"
GRAPHED = f"--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps {CAPTURED_AFTER}"
GRAPHED_MOE = f"{GRAPHED} --cuda-graph-modules attn moe_router moe_preprocess"
CONFIGURATIONS = ("dense", "moe", "grouped")
Runs = dict[str, Steps]


def main() -> int:
    """Run every configuration, and return the exit code."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    logs = args.output.with_suffix(".logs")
    logs.mkdir(parents=True, exist_ok=True)
    trainings = Trainings(args.ranks, args.at_once, logs)
    found: dict[str, dict[str, Any]] = {}
    failed = False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2 * len(args.configurations)) as pool:
        running = {name: start(args, name, Path(folder), trainings, pool) for name in args.configurations}
        try:
            while running:
                wait([each for name in running for each in running[name]], PROGRESS_EVERY)
                print(trainings.progress(), flush=True)
                for name in [name for name in running if all(each.done() for each in running[name])]:
                    parts = running.pop(name)
                    errors = [error for each in parts if (error := each.exception())]
                    print(f"{name}: {'ended' if not errors else errors[0]}", flush=True)
                    failed = failed or bool(errors)
                    if not errors:
                        steps, middle = lengths(args, name)
                        found[name] = compare(steps, middle, {k: v for each in parts for k, v in each.result().items()})
                        write(args, found)
        finally:
            trainings.stop()
    bad = [each for each in found.values() if each["differing_steps"] or each["without_graphs"] or not each["flat"]]
    return int(failed or bool(bad))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=CONFIGURATIONS)
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the results; logs go next to it")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--at-once", type=int, help="concurrent training jobs (default: as many as the GPUs allow)")
    parser.add_argument("--steps", type=int, default=2000, help="steps of `dense` and `grouped`")
    parser.add_argument("--moe-steps", type=int, default=500, help="steps of `moe`, whose experts run eagerly")
    parser.add_argument("--evaluate-every", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints, at most --resume-from")
    parser.add_argument("--resume-from", type=int, help="step of the restart (default: the middle)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128)
    args = parser.parse_args()
    if 0 < len(gpus()) < args.ranks:
        parser.error(f"--ranks {args.ranks}: only {len(gpus())} GPUs are visible: pass fewer ranks")
    args.at_once = args.at_once or max(1, len(gpus()) // args.ranks)
    return args


def lengths(args: argparse.Namespace, name: str) -> tuple[int, int]:
    """Return the number of steps of a configuration, and the restart step."""
    steps = args.moe_steps if name == "moe" else args.steps
    return steps, args.resume_from or steps // 2


def start(
    args: argparse.Namespace, name: str, folder: Path, trainings: Trainings, pool: ThreadPoolExecutor
) -> list[Future[Runs]]:
    """Start the eager run, and the graphed run with its restart; return a future of the steps of each."""
    moe = MOE if name == "moe" else f"{MOE} {UNBALANCED}" if name == "grouped" else ""
    steps, middle = lengths(args, name)
    sizes = f"""
        --num-layers {args.layers} --hidden-size {args.hidden} --seq-length {args.sequence}
        --max-position-embeddings {args.sequence} --global-batch-size {2 * args.ranks}
        --train-iters {steps} --eval-interval {args.evaluate_every}
    """
    kinds = f"{LOCAL} {ON_CPU}" if not gpus() else LOCAL if not _has_transformer_engine() else _te_flags(bool(moe))
    flags = f"{COMMON} {sizes} {kinds} {moe}"
    saved = folder / name
    graphs = GRAPHED_MOE if name == "moe" else GRAPHED
    graphed = f"{flags} {graphs} --save {saved} --save-interval {min(args.save_every, middle)}"

    def train(runs: dict[str, str]) -> Runs:
        return {run: trainings.train(f"{name}_{run}", flags) for run, flags in runs.items()}

    return [
        pool.submit(train, {"eager": f"{flags} {EAGER}"}),
        pool.submit(
            train,
            {
                "graphed": f"{graphed} --exit-interval {middle}",
                "resumed": f"{graphed} --load {saved} --ckpt-step {middle}",
            },
        ),
    ]


def write(args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    """Write the results so far."""
    command = command_line("benchmarks/soak.py", sys.argv[1:])
    write_results(args.output, command=command, gpus=args.ranks, **found)


def compare(steps: int, middle: int, done: dict[str, Steps]) -> dict[str, Any]:
    """Compare the restarted graphed run with the eager one, and return the result with the memory of all runs.

    Args:
        steps: Number of steps.
        middle: Last step before the restart.
        done: Steps of the runs ``eager``, ``graphed`` (before the restart) and ``resumed``.
    """
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
