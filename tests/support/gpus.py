"""Sizes, environment and results files of the comparisons on GPUs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import results_file

SIZES: dict[str, Any] = {"transformer_engine": True, "hidden": 512, "sequence": 1024, "micro_batch": 1}
# Without this, cuDNN's attention backward differs from run to run, graphs or not.
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
ENGINES = ("native", "transformer_engine")
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def write_results(name: str, found: Mapping[Any, dict[str, Any]]) -> None:
    """Write the results of ``tests/gpu/NAME.py`` to ``$EQUALITY_RESULTS/NAME.json``, if that folder is named.

    Args:
        name: Of the file, without its ending.
        found: For each layout (and engine) the results by case.
    """
    folder = os.environ.get("EQUALITY_RESULTS")
    if folder is None:
        return
    results_file.write_results(
        Path(folder) / f"{name}.json",
        command=f"EQUALITY_RESULTS=FOLDER python3 -m pytest tests/gpu/{name}.py",
        gpus=GPUS,
        sizes=SIZES,
        results=[
            {"tests": name} | dict(zip(("layout", "engine"), run, strict=False)) | result
            for run, by_case in found.items()
            for result in by_case.values()
        ],
    )
