"""Kill one of two ranks during capture or between the replays of a step, and report how the other rank ends.

    python tests/support/trainings/kill_a_rank.py --timeout 30
    python tests/support/trainings/kill_a_rank.py --timeout 30 --in-capture

The ranks are started without torchrun, which would terminate the survivor. On GPUs, NCCL's watchdog ends the
survivor ``--timeout`` seconds later. On the CPU backend, used without two GPUs, gloo detects the closed connection.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist

LAUNCHED = "replays begin"
TIMEOUT_IN_CAPTURE = 2  # seconds, from before capture on, as with --distributed-timeout-seconds-after-init


def killed(timeout: int, holds: str, in_capture: bool = False) -> tuple[int, float, str]:
    """Kill one of two ranks; return the survivor's exit status, the seconds until it exited, and its output.

    Args:
        timeout: Timeout of the process groups in seconds.
        holds: See ``Case``.
        in_capture: Kill the rank during capture instead of replay.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command = [sys.executable, __file__, "--timeout", str(timeout), "--holds", holds]
    command += ["--in-capture"] * in_capture
    survivor, victim = (
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    )
    try:
        victim.communicate(timeout=300)
        died = time.monotonic()
        output, _ = survivor.communicate(timeout=timeout + 120)
        return survivor.returncode, time.monotonic() - died, output
    finally:
        survivor.kill()
        victim.kill()


def kill_at_second(graphs: type, name: str) -> None:
    """Make the second call of the method ``name`` of ``graphs`` kill this process."""
    method, calls = getattr(graphs, name), []

    def die(graph: torch.cuda.CUDAGraph, *args, **kwargs) -> None:
        calls.append(graph)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        method(graph, *args, **kwargs)

    setattr(graphs, name, die)


def train(timeout: int, holds: str, in_capture: bool) -> None:
    """Train, and kill the last rank during capture or during the second step with graphs."""
    on_cpu = torch.cuda.device_count() < 2
    if on_cpu:
        from megatron_fsdp_cuda_graphs import cpu_backend

        cpu_backend.install()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    from megatron.core import parallel_state
    from tests.support.trainings.case import Case
    from tests.support.trainings.training import Training

    # The first rank survives, so it owns the store.
    dist.init_process_group("gloo" if on_cpu else "nccl", timeout=timedelta(seconds=timeout))
    parallel_state.initialize_model_parallel(distributed_timeout_minutes=timeout / 60)
    training = Training(Case(layers=2, warmup=2, holds=holds), graphs=True)
    training.make_helper()
    training.step()
    training.step()
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if in_capture:
        parallel_state.update_pg_timeout(timedelta(seconds=TIMEOUT_IN_CAPTURE))
        if is_last:
            kill_at_second(torch.cuda.CUDAGraph, "capture_begin")
    training.capture(lambda training: training.helper.create_cudagraphs())
    training.step()
    print(LAUNCHED, flush=True)
    if is_last:
        kill_at_second(torch.cuda.CUDAGraph, "replay")
    for _ in range(10):
        training.step()


def main() -> None:
    """Run a rank if RANK is set, otherwise start both ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=int, default=30, help="timeout of the process groups in seconds")
    parser.add_argument("--holds", default="model", help="scope of graphs; see Case")
    parser.add_argument("--in-capture", action="store_true", help="kill the rank in the capture, not in a replay")
    args = parser.parse_args()
    if "RANK" in os.environ:
        train(args.timeout, args.holds, args.in_capture)
        return
    status, seconds, output = killed(args.timeout, args.holds, args.in_capture)
    print(output[-3000:])
    print(f"the surviving rank ended {seconds:.1f} s after the kill, with exit status {status}")


if __name__ == "__main__":
    main()
