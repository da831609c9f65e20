"""Time per step of ``examples/pretrain_gpt.py`` under Megatron-FSDP: eager, and with a graph per layer by each engine.

    python benchmarks/pretrain_step_time.py --output benchmarks/results/pretrain_step_time.json

Runs the variants of ``examples/launch_gpt.sh`` (16 layers, hidden 2048, sequence 2048, bf16, micro-batch 1) one after
the other on the GPUs of this machine, in several rounds. Reported are the median milliseconds per step over the second
half of each run, their ratio to the eager run of the same round, the device memory that a rank holds at the end, and
whether every loss and gradient norm equals eager's. The exit code is 1 where one does not. Further flags go to every
run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "examples" / "launch_gpt.sh"
VARIANTS = {
    "eager": ("eager", {}),
    "graphs, native engine": ("graphed", {"MEGATRON_CUDA_GRAPH_ENGINE": "native"}),
    "graphs, TransformerEngine's engine": ("graphed", {"MEGATRON_CUDA_GRAPH_ENGINE": "transformer_engine"}),
}


def run(variant: str, gpus: int, steps: int, flags: list[str], folder: Path) -> dict:
    """Train one variant and return its steps' exact metrics."""
    mode, environment = VARIANTS[variant]
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Without the first, cuDNN's attention backward differs from run to run, and two eager runs differ.
    environment = {
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        **os.environ,
        **environment,
        "PATH": path,
        "GPUS": str(gpus),
        "STEP_METRICS_PATH": str(metrics),
    }
    command = ["bash", str(LAUNCH), mode, "--train-iters", str(steps), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{variant} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        "ms_per_step": statistics.median(line["ms"] for line in lines[len(lines) // 2 :]),
        "numbers": [(line["loss_hex"], line["grad_norm_hex"]) for line in lines],
        "last_loss": lines[-1]["loss"],
        "graphs": lines[-1]["graphs"],
        "reserved_mib": lines[-1]["reserved_mib"],
    }


def main() -> int:
    """Run all variants, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    args, flags = parser.parse_known_args()

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for round_number in range(args.rounds):
            eager: dict = {}
            for variant in VARIANTS:
                result = run(variant, args.gpus, args.steps, flags, Path(folder))
                eager = eager or result
                rows.append(
                    {
                        "round": round_number,
                        "variant": variant,
                        "ms_per_step": round(result["ms_per_step"], 2),
                        "speedup": round(eager["ms_per_step"] / result["ms_per_step"], 3),
                        "bit_equal_steps": sum(
                            a == b for a, b in zip(eager["numbers"], result["numbers"], strict=True)
                        ),
                        "steps": len(result["numbers"]),
                        "graphs_per_rank": result["graphs"],
                        "reserved_mib": result["reserved_mib"],
                        "last_loss": result["last_loss"],
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    if args.output:
        sys.path.insert(0, str(ROOT))
        from benchmarks.results_file import write_results

        options = f"--gpus {args.gpus} --steps {args.steps} --rounds {args.rounds} {' '.join(flags)}".rstrip()
        command = f"python benchmarks/pretrain_step_time.py {options}"
        write_results(args.output, command=command, gpus=args.gpus, results=rows)
    return int(any(row["bit_equal_steps"] != row["steps"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
