"""Determine which cases this machine can run."""

import importlib
import re
from dataclasses import dataclass

import torch

from .case import Case

CPU_BACKEND = "cpu_backend"


@dataclass(frozen=True)
class Machine:
    """This machine.

    Attributes:
        gpus: Number of visible GPUs.
        name: The GPU model, or ``CPU_BACKEND``; part of the names of golden values.
    """

    gpus: int
    name: str

    def cannot_run(self, case: Case) -> str | None:
        """Return the reason why ``case`` cannot run here, or None."""
        if case.on_cpu:
            return "the CPU backend needs CUDA_VISIBLE_DEVICES=" if self.gpus else None
        if case.ranks > self.gpus:
            return f"needs {case.ranks} GPUs, {self.gpus} are visible"
        missing = [package for package in case.needs if not _importable(package)]
        return f"needs {', '.join(missing)}, which cannot be imported" if missing else None


def this_machine() -> Machine:
    """Return this machine."""
    if not torch.cuda.is_available():
        return Machine(0, CPU_BACKEND)
    return Machine(torch.cuda.device_count(), _short(torch.cuda.get_device_name()))


def _short(device: str) -> str:
    """Return a short device name, for example ``h100`` for 'NVIDIA H100 80GB HBM3'."""
    model = device.removeprefix("NVIDIA ").split()[0]
    return re.sub(r"\W+", "_", model.lower())


def _importable(package: str) -> bool:
    try:
        importlib.import_module(package)
    except Exception:  # packages for other versions of CUDA or torch raise various errors on import
        return False
    return True
