"""Write docs/results.md from ``benchmarks/_tables/results.md`` and the files in ``benchmarks/results``.

    python benchmarks/tables.py            # write the page
    python benchmarks/tables.py --check    # exit with 1 if the page differs from the results

The template holds placeholders for tables and figures, with files relative to ``benchmarks/results``:

    {{steps: release/step_time_small_2gpu}}
    {{.1f: release/step_time_small_2gpu configurations/A/native/ms}}

A table is named after a function in ``benchmarks/_tables``, and followed by files. A value consists of a format, a file
and the path of a value in it (see ``value``).
"""

import argparse
import json
import re
import sys
from itertools import compress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._tables import checks, steps  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
TEMPLATE = ROOT / "benchmarks" / "_tables" / "results.md"
PAGE = ROOT / "docs" / "results.md"
PLACEHOLDER = re.compile(r"\{\{([.\w]+):(.*?)\}\}", re.DOTALL)
_TABLES = steps.steps, steps.levers, checks.equality, checks.faults, checks.soaks, checks.repeated
TABLES = {table.__name__: table for table in _TABLES}


def page() -> str:
    """Return the results page, rendered from its template."""
    return PLACEHOLDER.sub(_filled, TEMPLATE.read_text())


def _filled(found: re.Match) -> str:
    kind, (first, *rest) = found[1], found[2].split()
    if kind not in TABLES:
        return format(value(first, " ".join(rest)), kind)
    header, *rows = TABLES[kind]([_read(name) for name in (first, *rest)])
    measured = [{*column} != {"-"} for column in zip(*rows, strict=True)]  # leave out other columns
    header, *rows = [tuple(compress(row, measured)) for row in (header, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    lines.insert(1, "|---" * len(header) + "|")
    return "\n".join(lines)


def value(name: str, keys: str) -> Any:
    """Return a value from a results file.

    Args:
        name: The file, relative to ``benchmarks/results`` and without extension.
        keys: Path into the JSON, for example ``configurations/C/native/ms``. Omit ``--`` from keys. A list element is
            selected by its ``variant``, or else by its index.
    """
    found = _read(name)
    for key in keys.split("/"):
        if isinstance(found, list):
            named = [each for each in found if str(each.get("variant")).replace("--", "") == key]
            found = named[0] if named else found[int(key)]
        else:
            found = {name.replace("--", ""): each for name, each in found.items()}[key]
    return found


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def main(arguments: list[str] | None = None) -> int:
    """Write or check the page, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare, and exit with 1 if the page differs")
    args = parser.parse_args(arguments)
    new = page()
    differs = not PAGE.exists() or PAGE.read_text() != new
    if args.check and differs:
        print("docs/results.md differs from the results: run python benchmarks/tables.py")
    elif differs:
        PAGE.write_text(new)
    return int(args.check and differs)


if __name__ == "__main__":
    sys.exit(main())
