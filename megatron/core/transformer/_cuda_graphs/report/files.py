"""Writes a report as JSON and as a page."""

import json
from pathlib import Path

from .page import page
from .record import CaptureReport


def write(report: CaptureReport, folder: str, name: str) -> tuple[Path, Path]:
    """Write ``name.json`` and ``name.html`` to ``folder``, which is made if need be; return their paths.

    Raises:
        OSError: they cannot be written.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    data, html = target / f"{name}.json", target / f"{name}.html"
    data.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    html.write_text(page(report), encoding="utf-8")
    return data, html
