"""Measure how long ranks take to vote on a capture, on one host without GPUs.

python benchmarks/votes.py --ranks 2 8 32 --output votes.json
"""

import argparse
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.results_file import command_line, write_results  # noqa: E402

VOTES = 200
LIMIT = timedelta(minutes=2)


def vote(store: dist.TCPStore, rank: int, ranks: int) -> dict[str, float]:
    """Connect to the other ranks and vote; return the times in milliseconds."""
    from megatron.core.transformer._cuda_graphs.agreement import Ballot

    dist.init_process_group("gloo", store=dist.PrefixStore(str(ranks), store), rank=rank, world_size=ranks)
    dist.barrier()
    start = time.perf_counter()
    ballot = Ballot(dist.group.WORLD)
    ballot.vote()
    connected = time.perf_counter()
    for _ in range(VOTES):
        ballot.vote()
    seconds = {"connect_ms": connected - start, "vote_ms": (time.perf_counter() - connected) / VOTES}
    dist.barrier()
    dist.destroy_process_group()
    return {"ranks": ranks} | {name: round(each * 1e3, 2) for name, each in seconds.items()}


def main() -> None:
    """Run the command-line interface."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32], help="numbers of ranks to measure")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--rank", nargs=3, type=int, metavar=("RANK", "RANKS", "PORT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.rank:
        rank, ranks, port = args.rank
        vote(dist.TCPStore("localhost", port, is_master=False, timeout=LIMIT), rank, ranks)
        return
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    measured = []
    for ranks in args.ranks:
        command = [sys.executable, "-W", "ignore", __file__, "--rank"]
        others = [subprocess.Popen([*command, str(rank), str(ranks), str(store.port)]) for rank in range(1, ranks)]
        measured.append(vote(store, 0, ranks))
        for other in others:
            other.wait(LIMIT.total_seconds())
        print(measured[-1], flush=True)
    if args.output:
        command_text = command_line("benchmarks/votes.py", sys.argv[1:])
        write_results(args.output, command=command_text, gpus=0, cores=os.cpu_count(), votes=measured)


if __name__ == "__main__":
    main()
