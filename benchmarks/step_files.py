"""Lists the files of this patch that a training step passes through, for each way to capture a model.

    python -m megatron_fsdp_cuda_graphs.cpu_backend benchmarks/step_files.py

Trains a small model of three layers on one CPU rank, eagerly, with a graph for each layer, with one of all layers and
with one of the whole model, and notes where functions run in the fifth step: in schedule, model, Megatron-FSDP and
optimizer. Files of megatron-core are not listed.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_cuda_graphs.overlay import ROOT as PATCH

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.trainings.case import Case
from tests.support.trainings.training import Training

MODES = {"eager": None, "a graph for each layer": "layer", "all layers": "decoder", "the whole model": "model"}


@contextmanager
def noted(files: dict[str, int]) -> Iterator[None]:
    """Count the calls of Python functions in each file of the patch."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PATCH):
                name = path.relative_to(PATCH).as_posix()
                files[name] = files.get(name, 0) + 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def files_of_a_step(holds: str | None) -> dict[str, int]:
    """Train some steps; return the calls in each file during the last.

    Args:
        holds: As of ``Case``; None for eager training.
    """
    graphs = holds is not None
    case = Case(dtype="bf16", layers=3, holds=holds or "decoder", warmup=3, norm_on_device=True)
    training = Training(case, graphs)
    files: dict[str, int] = {}
    try:
        if graphs:
            training.make_helper()
        for step in range(8):
            if graphs and not training.before_step() and step == case.warmup:
                training.capture(lambda training: training.helper.create_cudagraphs())
            if step < 7:
                training.step()
        with noted(files):
            training.step()
        if graphs:
            training.helper.delete_cuda_graphs()
    finally:
        training.patches.close()
    return files


def main() -> None:
    """Print a list for each way."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    with torch.cuda.stream(torch.cuda.Stream()):
        for name, holds in MODES.items():
            files = files_of_a_step(holds)
            print(f"{name}: {len(files)} files, {sum(files.values())} calls")
            for file, calls in sorted(files.items()):
                print(f"  {calls:5} {file}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
