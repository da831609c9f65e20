"""A model of a step under Megatron-FSDP (ZeRO-3), fitted on measured runs, checked on others, asked about larger ones.

    cd benchmarks/results/step_model
    python ../../step_model.py --output model.json --fit a_b_profiled.json b_chains.json \\
        --check step_time_variants.json chains.json step_time.json

Files are of ``step_time.py`` and ``scaling.py``; dense models, eager and with this project's graphs. Each is taken for
a host of its own: hosts differ, and one number says how slow a file's host is beside the first one's. Fitted are
    the GPU      rate of matrix products, what a layer takes at least, what a parameter of the optimizer takes
    the link     bytes a second and the start of a collective, from profiles (--fit only)
    the host     a layer's passes by mode, what is outside of layers and of passes, how slow each host is
Runs of --fit with at most 16 layers and 2 micro-batches are fitted; so is the smallest model (B) of a file of --check,
which tells its host's speed. All others are checked: the exit code is 1 where one is off by more than 10%.

Then it says what a step takes with more GPUs. Assumed, not measured: 8 GPUs a node with the measured link; a node's 8
adapters of 400 Gb/s (NVIDIA's data sheets of DGX H100 and H200), of which 80% is reached; and that each further step of
a collective's ring takes --hop-us within a node and --network-hop-us between nodes. These are 0 unless given, as for
collectives that are bound by bytes; give some to see how much the answer depends on them.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._step_model import fit  # noqa: E402
from benchmarks._step_model.predict import predictions  # noqa: E402
from benchmarks._step_model.runs import Run, read_runs  # noqa: E402
from benchmarks._step_model.step import MODES, Gpu, Host, Link, compute_ms, exposed_ms, step_ms  # noqa: E402
from benchmarks.results_file import command_line, write_results  # noqa: E402

TOLERANCE = 0.1
MOST_LAYERS, MOST_MICRO_BATCHES = 16, 2  # of runs that are fitted


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments.

    Raises:
        SystemExit: they are wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=Path, nargs="+", required=True, metavar="JSON")
    parser.add_argument("--check", type=Path, nargs="+", default=[], metavar="JSON")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="of a rank's micro-batch")
    parser.add_argument("--memory-gb", type=float, default=141, help="of a GPU (default: H200)")
    parser.add_argument("--network-gb-per-s", type=float, default=0.8 * 8 * 50, help="that a node receives")
    parser.add_argument("--hop-us", type=float, default=0.0, help="of a ring's step within a node")
    parser.add_argument("--network-hop-us", type=float, default=0.0, help="of a ring's step between nodes")
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    return parser.parse_args(arguments)


def split(fitted: Sequence[Run], checked: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Return which runs are fitted, and which are checked."""
    small = [run for run in fitted if run.work.layers <= MOST_LAYERS and run.work.micro_batches <= MOST_MICRO_BATCHES]
    known = small + [run for run in checked if run.is_smallest]
    hosts = {run.host for run in known}
    return known, [run for run in (*fitted, *checked) if run not in known and run.host in hosts]


def compared(runs: Sequence[Run], gpu: Gpu, link: Link, host: Host) -> list[dict[str, Any]]:
    """Return the model's time of each run beside the measured one."""
    return [
        {
            "host": run.host,
            "run": run.name,
            "mode": run.mode,
            "measured_ms": run.ms,
            "model_ms": round(step_ms(run.work, run.mode, gpu, link, host, host.slowness[run.host]), 2),
            "compute_ms": round(compute_ms(run.work, gpu), 2),
            "exposed_ms": round(exposed_ms(run.work, gpu, link), 2),
            "error": round(fit.error(run, gpu, link, host), 3),
        }
        for run in runs
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as a table."""
    for row in rows:
        off = "  off by more than 10%" if abs(row["error"]) > TOLERANCE else ""
        name = f"{row['host']}: {row['run']}, {row['mode']}"
        print(f"  {name:70s} {row['measured_ms']:8.1f} {row['model_ms']:8.1f} {row['error']:+8.1%}{off}")


def show_predictions(rows: Sequence[dict[str, Any]]) -> None:
    """Print predictions as a table."""
    header = ("model", "GPUs", "fits", "compute", "exposed", *MODES, "eager from", "hidden from")
    print("".join(f"{name:>19s}" if " " in name else f"{name:>9s}" for name in header))
    for row in rows:
        cells = [row["model"], row["gpus"], "yes" if row["fits"] else "no", row["compute_ms"], row["exposed_ms"]]
        cells += [*row["step_ms"].values(), row["eager_suffices"] or "-", row["collectives_are_hidden"] or "-"]
        print("".join(f"{cell:>{19 if ' ' in name else 9}}" for name, cell in zip(header, cells, strict=True)))


def main() -> int:
    """Fit, check, predict; print and write what was found."""
    args = parse()
    fitted, checked = ([run for path in paths for run in read_runs(path)] for paths in (args.fit, args.check))
    known, unknown = split(fitted, checked)
    link = Link(network_gb_per_s=args.network_gb_per_s, hop_us=args.hop_us, network_hop_us=args.network_hop_us)
    gpu, link = fit.fit_gpu(fitted), fit.fit_link(fitted, link)
    host = fit.fit_host(known, gpu, link)
    rows = {"fitted": compared(known, gpu, link, host), "checked": compared(unknown, gpu, link, host)}
    for name, each in rows.items():
        print(f"{name}: measured ms, model ms, error")
        show(each)
    beyond = [row for row in rows["checked"] if abs(row["error"]) > TOLERANCE]
    worst = max((abs(row["error"]) for row in rows["checked"]), default=None)
    print(
        f"{len(beyond)} of {len(rows['checked'])} checked runs are off by more than 10%"
        if worst is not None
        else "nothing was checked"
    )
    values: dict[str, Any] = {"gpu": asdict(gpu), "link": asdict(link), "host": asdict(host)}
    print(json.dumps(values, indent=1))
    ahead = []
    for tokens in args.tokens:
        rows_ahead = list(predictions(args.gpus, tokens, gpu, link, host, memory_gb=args.memory_gb))
        print(f"predicted, one micro-batch of {tokens} tokens: ms; tokens from which on eager suffices, all is hidden")
        show_predictions(rows_ahead)
        ahead += rows_ahead
    if args.output:
        write_results(
            args.output,
            command=command_line("benchmarks/step_model.py", sys.argv[1:]),
            hardware=", ".join(dict.fromkeys(run.hardware for run in known)),
            values=values,
            fitted=rows["fitted"],
            checked=rows["checked"],
            worst_error=worst,
            predictions=ahead,
        )
    return int(bool(beyond) or worst is None)


if __name__ == "__main__":
    sys.exit(main())
