"""Write results to a file, with the command, hardware and versions that produced them."""

import json
import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PATHS = ("--output", "--logs")
PACKAGES = ("megatron-core", "transformer-engine", "megatron-fsdp-cuda-graphs")


def write_results(path: Path, *, command: str, gpus: int = 1, **found: Any) -> None:
    """Write ``found`` to ``path`` as JSON, with the command, the hardware and ``versions()``.

    Args:
        path: The file.
        command: The command that reproduces the results.
        gpus: The number of GPUs used; ignored on the CPU backend.
        found: JSON values by name.
    """
    write_json(path, {"command": command, "hardware": hardware(gpus), "versions": versions(), **found})


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write ``report`` to ``path`` as JSON with one line per case.

    A case is an element of a list in ``report``, or of a list in a dictionary in ``report``.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")  # readers never see a partially written file
    unfinished.write_text(_text(report) + "\n")
    unfinished.replace(path)


def _text(value: Any, depth: int = 0) -> str:
    if isinstance(value, dict) and value and depth < 2:
        (opening, closing), lines = "{}", [f"{json.dumps(str(key))}: {_text(value[key], depth + 1)}" for key in value]
    elif isinstance(value, list | tuple) and value:
        (opening, closing), lines = "[]", [json.dumps(element) for element in value]
    else:
        return json.dumps(value)
    end = "\n" + " " * depth
    return f"{opening}{end} {f',{end} '.join(lines)}{end}{closing}"


def command_line(script: str, arguments: Sequence[str]) -> str:
    """Return the command that reproduces this run of ``script``, without output paths (``PATHS``)."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument.partition("=")[0] not in PATHS:
            kept.append(argument)
        skip = argument in PATHS
    return shlex.join(["python", script, *kept])


def hardware(gpus: int) -> str:
    """Return the number and model of the GPUs, or the CPU backend if there are none."""
    return f"{gpus} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "CPU backend"


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and the installed packages among ``PACKAGES``, by name."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
