"""Files of results: what was found, behind the command that found it, the hardware and the versions."""

import json
import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PATHS = ("--output", "--logs", "--golden")
PACKAGES = ("megatron-core", "transformer-engine", "megatron-fsdp-cuda-graphs")


def write_results(path: Path, *, command: str, gpus: int = 1, **found: Any) -> None:
    """Write ``found`` to ``path`` as JSON, with the versions of Python, torch and the installed ones of ``PACKAGES``.

    Args:
        path: The file.
        command: How to find the same again.
        gpus: How many GPUs were used, where there are any.
        found: Values that JSON can hold, by name.
    """
    report = {"command": command, "hardware": hardware(gpus), "versions": versions(), **found}
    unfinished = path.with_name(f"{path.name}.unfinished")  # who reads or is killed meanwhile finds the file whole
    unfinished.write_text(json.dumps(report, indent=1) + "\n")
    unfinished.replace(path)


def command_line(script: str, arguments: Sequence[str]) -> str:
    """Return how to run ``script`` again, without where its files went (``PATHS``)."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument.partition("=")[0] not in PATHS:
            kept.append(argument)
        skip = argument in PATHS
    return shlex.join(["python", script, *kept])


def hardware(gpus: int) -> str:
    """Name ``gpus`` GPUs of this machine, or the CPU backend where there is none."""
    return f"{gpus} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "CPU backend"


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and the installed ones of ``PACKAGES``, by name."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
