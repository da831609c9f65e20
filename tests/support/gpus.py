"""What the comparisons on GPUs have in common."""

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {"transformer_engine": True, "hidden": 512, "sequence": 1024, "micro_batch": 1}
# Without this, cuDNN's attention backward differs from run to run, graphs or not.
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
ENGINES = ("native", "transformer_engine")
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

PACKAGES = ("megatron-core", "transformer-engine", "megatron-fsdp-cuda-graphs")


def write_results(name: str, found: Mapping[Any, dict[str, Any]]) -> None:
    """Write the results of ``tests/gpu/NAME.py`` to ``$EQUALITY_RESULTS/NAME.json``, if that folder is named.

    Args:
        name: Of the file, without its ending.
        found: For each layout (and engine) the results by case.
    """
    folder = os.environ.get("EQUALITY_RESULTS")
    if folder is None:
        return
    report = {
        "command": f"EQUALITY_RESULTS=FOLDER python3 -m pytest tests/gpu/{name}.py",
        "hardware": f"{GPUS} x {torch.cuda.get_device_name()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {package: version(package) for package in PACKAGES},
        "sizes": SIZES,
        "results": [
            dict(zip(("layout", "engine"), run, strict=False)) | result
            for run, by_case in found.items()
            for result in by_case.values()
        ],
    }
    (Path(folder) / f"{name}.json").write_text(json.dumps(report, indent=1))
