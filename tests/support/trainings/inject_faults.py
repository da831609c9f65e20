"""Fail captures at every operator and call, one at a time, and check the state after each failure.

    torchrun --nproc-per-node 2 tests/support/trainings/inject_faults.py --output results.json
    torchrun --nproc-per-node 2 tests/support/trainings/inject_faults.py --output results.json --stride 40
    torchrun --nproc-per-node 2 tests/support/trainings/inject_faults.py --output out.json --tp 2 --holds layer model

Captures are attempted between training steps, each with one fault on one rank or on all ranks. Every rank must then
raise an error that names the failed rank within ``LIMIT`` seconds, the timeout of collectives. Hooks, parameters,
generators, flags, environment and buffers must be restored. Every few attempts, a step must equal the same step of
a model that never captured; so must a step with graphs at the end. Without a GPU, ranks use the CPU backend. Results
are written as they arrive.
"""

import argparse
import functools
import gc
import json
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp_cuda_graphs import cpu_backend
from tests.support.ranks.rank_backend import on_cpu  # isort: split

from benchmarks.results_file import command_line, write_results
from tests.support.trainings.case import Case
from tests.support.trainings.controls import training_state
from tests.support.trainings.training import Trace, Training, train

LIMIT = 60.0  # seconds
STEPS_BETWEEN = 25  # attempts between steps
SMALL: dict[str, Any] = {"hidden": 16, "sequence": 8, "micro_batch": 1, "dropout": 0.1, "warmup": 10}
SMALL |= {"layers": 2, "num_attention_heads": 2}


class InjectedError(RuntimeError):
    """Raised in place of an operator or call."""


def _raise(error: type[BaseException]) -> None:
    raise error("injected fault")


def _wait_on_host() -> None:
    """Synchronize, which is forbidden during capture."""
    if not on_cpu:
        torch.cuda.current_stream().synchronize()
        return
    from megatron_fsdp_cuda_graphs.cpu_backend import streams

    streams.refuse_while_capturing("injected fault")


KINDS: dict[str, Callable[[], None]] = {
    "exception": lambda: _raise(InjectedError),
    "memory": lambda: _raise(torch.OutOfMemoryError),
    "interrupt": lambda: _raise(KeyboardInterrupt),
    "host sync": _wait_on_host,
}


@dataclass(eq=False)
class Faults(TorchDispatchMode):
    """Counts the operators and calls of a capture and fails one of them.

    Attributes:
        at: Index of the operator or call to fail; None to only count.
        happens: Called to inject the fault; raises or synchronizes.
        captured_only: Count only during stream capture.
        names: Names of the operators and calls counted so far.
        fired: Whether the fault has been injected.
    """

    at: int | None = None
    happens: Callable[[], None] = lambda: None
    captured_only: bool = False
    names: list[str] = field(default_factory=list)
    fired: bool = False
    internal: int = 0  # call depth inside the CPU backend; these calls have no counterpart on GPUs

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.internal and (not func.namespace.startswith("prof")):
            self.count(str(func), torch.cuda.is_current_stream_capturing())
        return func(*args, **(kwargs or {}))

    def count(self, name: str, captured: bool) -> None:
        """Count one operator or call, and inject the fault if its index is ``at``."""
        if self.captured_only and not captured:
            return
        self.names.append(name)
        if len(self.names) - 1 == self.at:
            self.fired = True
            self.happens()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context manager that counts operators and calls of a capture, and fails the one at index ``at``."""
        from megatron.core.transformer._cuda_graphs.engine.capture_time_hooks import CaptureTimeHooks
        from megatron.core.transformer._cuda_graphs.engine.graph import Capture

        with ExitStack() as stack:
            for owner, name in ((CaptureTimeHooks, "run"), (Capture, "new_graph"), (Capture, "recording")):
                self._patch(stack, owner, name, counted=True)
            for name in ("capture_begin", "capture_end"):
                self._patch(stack, torch.cuda.CUDAGraph, name, counted=name == "capture_begin", internal=on_cpu)
            if on_cpu:
                from megatron_fsdp_cuda_graphs.cpu_backend import distributed as cpu_distributed
                from megatron_fsdp_cuda_graphs.cpu_backend.tape import Recorder

                for name in cpu_distributed.WRITING:  # after ranks have agreed on the launch
                    self._patch(stack, dist.ProcessGroup, name, counted=False, internal=True)
                self._patch(stack, cpu_distributed.HeldWork, "wait", counted=True, internal=True)
                self._patch(stack, Recorder, "_record", counted=True, captured=True, internal=True)
            with self:
                yield

    def _patch(
        self, stack: ExitStack, owner: Any, name: str, *, counted: bool, captured: bool = False, internal: bool = False
    ) -> None:
        call = getattr(owner, name)

        @functools.wraps(call)
        def patched(*args: Any, **kwargs: Any) -> Any:
            if counted:
                shown = str(args[1]) if captured else f"{owner.__name__}.{name}"
                self.count(shown, captured or torch.cuda.is_current_stream_capturing())
            self.internal += internal
            try:
                return call(*args, **kwargs)
            finally:
                self.internal -= internal

        stack.enter_context(mock.patch.object(owner, name, patched))


def attempt(training: Training, faults: Faults) -> tuple[BaseException | None, float]:
    """Capture with ``faults`` as if for the first time; return the error (None on success) and the time in seconds."""
    if hasattr(training.chunks[0].module, "graphs"):
        training.chunks[0].module.graphs.reduced_once.clear()
    start = time.perf_counter()
    try:
        with faults.counting():
            training.capture(lambda training: training.helper.create_cudagraphs())
    except BaseException as error:
        return error, time.perf_counter() - start
    return None, time.perf_counter() - start


@dataclass
class Attempts:
    """Capture attempts on one model.

    Attributes:
        steps: Description of the event before each training step.
        problems: Attempts and steps that failed the checks.
        counted: Number of attempts per kind of fault, with one or all ranks failing.
        passed: Like ``counted``, for attempts that raised the expected error and restored all state.
        slowest: Longest time from the start of an attempt to its error, in seconds.
        unreached: Number of attempts whose capture ended before the index of the fault.
        compared: Number of training steps compared with eager.
    """

    training: Training
    steps: list[str] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    passed: Counter = field(default_factory=Counter)
    counted: Counter = field(default_factory=Counter)
    slowest: float = 0.0
    unreached: int = 0
    compared: int = 0

    def places(self, captured_only: bool) -> list[str]:
        """Return the names of a capture's operators and calls on rank 0; other ranks may differ slightly."""
        faults = Faults(captured_only=captured_only)
        error, _ = attempt(self.training, faults)
        if error is not None:
            raise error
        self.training.helper.delete_cuda_graphs()
        names = [faults.names]
        dist.broadcast_object_list(names, src=0)
        return names[0]

    def fail(self, kind: str, at: int, on: list[int]) -> None:
        """Fail a capture at index ``at`` on the ranks ``on``, and record leftover state."""
        before = training_state(self.training)
        mine = dist.get_rank() in on
        faults = Faults(at if mine else None, KINDS[kind], captured_only=kind == "host sync")
        error, seconds = attempt(self.training, faults)
        problems = self._problems(error, seconds, kind, mine, faults)
        if error is None:
            self.training.helper.delete_cuda_graphs()
        after = training_state(self.training)
        problems += [f"changed: {key}" for key in before if before[key] != after[key]]
        self.slowest = max(self.slowest, seconds)
        everywhere: list[Any] = [None] * dist.get_world_size()
        name = faults.names[at] if faults.fired else ""
        dist.all_gather_object(everywhere, (problems, name, str(error)))
        if not any(name or text != "None" for _, name, text in everywhere):
            self.unreached += 1  # this capture was shorter
            return
        which = f"{kind}, {'all ranks' if len(on) > 1 else 'one rank'}"
        self.counted[which] += 1
        if any(found for found, _, _ in everywhere):
            self.problems.append({"kind": kind, "at": at, "ranks": on, "found": everywhere})
        else:
            self.passed[which] += 1
        if sum(self.counted.values()) % STEPS_BETWEEN == 0:
            self.step(f"after {which} at {at}: {name}")

    def _problems(
        self, error: BaseException | None, seconds: float, kind: str, mine: bool, faults: Faults
    ) -> list[str]:
        from megatron.core.transformer._cuda_graphs.errors import CaptureFailedError, CaptureInterruptedError

        problems = [] if seconds < LIMIT else [f"the error took {seconds:.0f} s"]
        if mine and not faults.fired and error is None:  # another rank may have failed earlier
            problems.append(f"the capture has only {len(faults.names)} operators and calls")
        expected: type[BaseException] = CaptureFailedError
        if kind == "interrupt":
            expected = KeyboardInterrupt if mine else CaptureInterruptedError
        if type(error) is not expected:
            shown = "" if error is None else "".join(traceback.format_exception(error))[-1500:]
            problems.append(f"raised {type(error).__name__}: {shown}")
        elif expected is not KeyboardInterrupt and not re.search("rank .*(layer|whole model)", str(error)):
            problems.append(f"the error names no rank or layer: {error}")
        return problems

    def step(self, where: str) -> None:
        """Train one step; ``where`` describes the event that precedes it."""
        self.training.step()
        self.steps.append(where)

    def compare(self, eager: Trace) -> None:
        """Record differences between the steps of this model and of ``eager``, a model that never captured."""
        found = eager.differences(self.training.trace())
        self.compared = len(self.training.losses)
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found)
        if any(everywhere):
            self.problems.append({"steps": self.steps, "found": everywhere})


def run(case: Case, stride: int, write: Callable[[dict[str, Any]], None]) -> None:
    """Attempt captures with one fault each.

    Args:
        case: The case to train.
        stride: Distance between the indices of faults; the first index is ``stride // 2``.
        write: Callback that receives the results so far.
    """
    start = time.monotonic()
    training = Training(case, graphs=True)
    training.make_helper()
    attempts = Attempts(training)
    attempts.step("at the beginning")
    attempts.places(False)  # allocates memory that later captures reuse
    gc.collect()
    gc.freeze()  # exclude live objects from garbage collection during captures
    places: dict[str, int] = {}
    replays = 0

    def report() -> None:
        write(
            {
                "case": str(case),
                "ranks": dist.get_world_size(),
                "places": places,
                "stride": stride,
                "attempts": dict(attempts.counted),
                "passed": dict(attempts.passed),
                "unreached": attempts.unreached,
                "steps_compared": attempts.compared,
                "replays_at_the_end": replays,
                "slowest_seconds": round(attempts.slowest, 3),
                "seconds": round(time.monotonic() - start, 1),
                "problems": attempts.problems,
            }
        )

    for kind in KINDS:
        names = attempts.places(captured_only=kind == "host sync")
        places[kind] = len(names)
        for number, at in enumerate(range(stride // 2, len(names), stride)):
            ranks = list(range(dist.get_world_size()))
            if dist.get_rank() == 0:
                # Last line of the log if the run hangs.
                print(f"{kind} at {at} of {len(names)}: {names[at]}", flush=True)
            attempts.fail(kind, at, ranks)
            if len(ranks) > 1:
                attempts.fail(kind, at, [ranks[number % len(ranks)]])
            if number % STEPS_BETWEEN == 0:
                report()
    attempts.step("after all attempts")
    training.capture(lambda training: training.helper.create_cudagraphs())
    attempts.step("with graphs")
    replays = training.trace().replays
    training.helper.delete_cuda_graphs()
    attempts.compare(train(replace(case, steps=len(training.losses)), graphs=False))
    report()


def main() -> None:
    """Run the command-line interface."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--stride", type=int, default=1, help="distance between faults")
    parser.add_argument("--case", type=json.loads, default={}, help="additional arguments of Case.of, as JSON")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--ep", type=int, default=1, help="expert parallel ranks")
    parser.add_argument("--holds", nargs="+", default=["model", "layer"], help="scopes of graphs; see Case")
    args = parser.parse_args()
    if not on_cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if on_cpu else "nccl", timeout=timedelta(seconds=LIMIT))
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tp,
        expert_model_parallel_size=args.ep,
        num_distributed_optimizer_instances=args.case.get("num_distributed_optimizer_instances", 1),
        distributed_timeout_minutes=LIMIT / 60,
    )
    command = command_line("tests/support/trainings/inject_faults.py", sys.argv[1:]).replace(
        "python", "torchrun --nproc-per-node 2", 1
    )
    done: dict[str, dict[str, Any]] = {}

    def write(result: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            done[result["case"]] = result
            write_results(args.output, command=command, gpus=dist.get_world_size(), results=list(done.values()))

    for holds in args.holds:
        case = Case.of(SMALL | {"holds": holds} | args.case)
        run(case, args.stride, write)
    for result in done.values():
        attempts, passed = sum(result["attempts"].values()), sum(result["passed"].values())
        print(f"{result['case']}: {passed} of {attempts}, slowest {result['slowest_seconds']} s", flush=True)
    dist.destroy_process_group()
    if on_cpu:
        cpu_backend.leave()


if __name__ == "__main__":
    main()
