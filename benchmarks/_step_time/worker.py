"""Run one rank of a benchmark: train every run of a plan with a fresh model and the same data.

    torchrun --nproc-per-node 2 benchmarks/_step_time/worker.py PLAN RESULTS LOGS

PLAN is a JSON file of ``plan.Run``s. The first rank appends a JSON line to RESULTS at the start and end of each run. A
rank with an error appends a line and exits, because the device may be unusable, and other ranks may be waiting.
"""

import json
import os
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT), str(ROOT / "examples")]  # replaces this folder
sys.path.append(str(ROOT / "tests/support/stand_ins"))  # unless Apex is installed

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks._step_time.checksums import Checksums  # noqa: E402
from benchmarks._step_time.cleanup import clean_up  # noqa: E402
from benchmarks._step_time.plan import Run  # noqa: E402
from benchmarks._step_time.recorder import CaptureClock, Recorder, TrainingLog, count_graphs  # noqa: E402
from benchmarks._step_time.resident import without_collectives  # noqa: E402
from benchmarks._step_time.step_profile import StepProfile  # noqa: E402
from megatron.training.global_vars import get_args  # noqa: E402
from megatron.training.training import num_floating_point_operations  # noqa: E402


class Worker:
    """Trains runs on this rank.

    Args:
        on_cpu: Whether to use the CPU backend.
        logs: Folder for traces.
    """

    def __init__(self, *, on_cpu: bool, logs: Path):
        import pretrain_gpt

        self._main = pretrain_gpt.main
        self._on_cpu, self._logs = on_cpu, logs
        self._log = TrainingLog()
        self._clock = CaptureClock()
        self._clock.install()
        self._default, self._side = torch.cuda.current_stream(), torch.cuda.Stream()

    def train(self, run: Run) -> dict[str, Any]:
        """Train ``run``, clean up the process, and return the measurements."""
        result: dict[str, Any] = {}
        left = self._memory()

        def after_step(step: int) -> None:
            if step == run.steps and not run.profiled:
                now = self._memory()
                result.update({name: now[name] - left[name.removeprefix("max_")] for name in now})
                result["graphs"] = count_graphs()

        profiled = self._profile(run) if run.profiled else None
        examination = Checksums() if run.checksums else None
        looks = examination or profiled
        self._clock.seconds = 0.0
        recorder = Recorder(looks.after_step if looks else after_step)
        self._train(run, recorder)
        result["numbers"] = recorder.numbers()
        if profiled:
            result["profile"] = profiled.figures
        elif examination:
            result["found"] = examination.found()
        elif not run.profiled:  # of profiled runs, only rank 0 reports
            every = get_args().log_interval
            result |= recorder.milliseconds(run.steps // 2 + 1, run.steps, every=every)
            result |= throughput(result["ms"])
            result["capture_seconds"] = round(self._clock.seconds, 3)
        del recorder
        result["left_mib"] = clean_up()
        return result

    def _profile(self, run: Run) -> StepProfile | None:
        if dist.get_rank() == 0:
            return StepProfile(self._logs, run.file_name, on_gpu=not self._on_cpu)
        return None

    def _train(self, run: Run, recorder: Recorder) -> None:
        before = dict(os.environ)
        os.environ.update(run.environment)
        # megatron.training sets the stream only when it initializes torch.distributed.
        torch.cuda.set_stream(self._side if run.side_stream else self._default)
        sys.argv = ["pretrain_gpt.py", *run.flags]
        self._log.recorder = recorder
        try:
            with nullcontext() if run.communicates else without_collectives():
                self._main()
        except SystemExit as end:  # --exit-interval
            if end.code:
                raise
        finally:
            self._log.recorder = None
            torch.cuda.set_stream(self._default)
            for name in set(os.environ) - set(before):
                del os.environ[name]
            os.environ.update(before)

    def _memory(self) -> dict[str, int]:
        """Return the current and peak MiB of reserved and allocated memory, and the MiB of graph pools."""
        torch.cuda.synchronize()
        names = ("max_memory_reserved", "memory_reserved", "max_memory_allocated", "memory_allocated")
        found = {f"{name.replace('memory_', '')}_mib": getattr(torch.cuda, name)() // 2**20 for name in names}
        return found | {"graph_pools_mib": 0 if self._on_cpu else graph_memory() // 2**20}


def throughput(ms: float) -> dict[str, float]:
    """Return tokens and model TFLOP (megatron-core's formula) per second and GPU, given the milliseconds of a step."""
    args = get_args()
    per_second = 1000 / ms / dist.get_world_size()
    operations = num_floating_point_operations(args, args.global_batch_size)
    return {
        "tokens_per_second": round(args.global_batch_size * args.seq_length * per_second),
        "tflops": round(operations / 1e12 * per_second, 1),
    }


def graph_memory() -> int:
    """Return the bytes in pools of CUDA graphs."""
    segments = torch.cuda.memory_snapshot(include_traces=False)
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))


def main(plan: Path, results: Path, logs: Path) -> None:
    """Train every run of ``plan``."""
    on_cpu = "MEGATRON_STEP_TIME_ON_CPU" in os.environ
    if not on_cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if on_cpu else "nccl")
    worker = Worker(on_cpu=on_cpu, logs=logs)

    def tell(run: Run, event: str, **more: Any) -> None:
        with results.open("a") as file:
            file.write(json.dumps({"run": run.number, "event": event, **more}) + "\n")

    for description in json.loads(plan.read_text()):
        run = Run(**description)
        dist.barrier()
        if dist.get_rank() == 0:
            tell(run, "started")
        start = time.perf_counter()
        try:
            result = worker.train(run)
        except BaseException:
            tell(run, "failed", error=f"rank {dist.get_rank()}: {traceback.format_exc()}")
            os._exit(1)
        if dist.get_rank() == 0:
            tell(run, "ended", seconds=round(time.perf_counter() - start, 1), **result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]))
