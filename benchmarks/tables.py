"""Write the tables and figures of the documents from files of results.

    python benchmarks/tables.py            # update all documents
    python benchmarks/tables.py --check    # exit with 1 if a document is outdated

A table is between two comments. The first one has its kind (``KINDS``) and its files, relative to
``benchmarks/results``. A figure precedes a comment with its source:

    42.1<!--=release/step_time_a_b_1gpu configurations/A/native/ms-->

The source is a file and keys, without ``--``, which comments cannot contain. The key of a list element is its
``variant`` or its index. ``over`` between two sources makes a ratio. A figure keeps its number of decimals. A test
fails for figures without a source.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._tables import checks, steps  # noqa: E402

DOCUMENTS = ("README.md", "docs/performance.md", "docs/measurements.md", "docs/plan.md", "docs/scale.md")
RESULTS = "benchmarks/results"
COMMENT = "<!-- {} by benchmarks/tables.py from: {} -->"
END = "<!-- end of what tables.py made -->"
BLOCK = re.compile(COMMENT.format(r"(\w+)", "(.*?)") + "\n(.*?)" + END, re.DOTALL)
FIGURE = re.compile(r"(\d[\d,]*)(\.\d+)?<!--=(\S+) (.+?)-->", re.DOTALL)
KINDS = {
    kind.__name__: kind
    for kind in (
        *(steps.times, steps.launches, steps.levers, steps.memory, steps.recomputation, steps.growth),
        *(checks.equality, checks.faults, checks.soaks, checks.repeated),
    )
}


def rewritten(text: str, up: str = "") -> str:
    """Return a document with updated tables and figures.

    Args:
        text: The document.
        up: Relative path from its folder to the repository, for links.
    """

    def block(found: re.Match) -> str:
        results = {f"{up}{RESULTS}/{name}.json": _read(name) for name in found[2].split()}
        header, *rows = KINDS[found[1]](results)
        lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
        lines.insert(1, "|---" * len(header) + "|")
        return "\n".join([COMMENT.format(found[1], found[2]), *lines, END])

    def figure(found: re.Match) -> str:
        whole, digits, name, keys = found.groups(default="")
        first, _, second = keys.partition(" over ")
        value = _value(_read(name), first) / (_value(_read(name), second) if second else 1)
        grouped = "," if "," in whole else ""
        return f"{value:{grouped}.{max(0, len(digits) - 1)}f}<!--={name} {keys}-->"

    return FIGURE.sub(figure, BLOCK.sub(block, text))


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / RESULTS / f"{name}.json").read_text())
    return found


def _value(found: Any, keys: str) -> float:
    for key in keys.split("/"):
        if isinstance(found, list):
            names = (str(each.get("variant")).replace("--", "") for each in found)
            named = [each for each, own in zip(found, names, strict=True) if key == own]
            found = named[0] if named else found[int(key)]
        else:
            found = {name.replace("--", ""): each for name, each in found.items()}[key]
    return float(found)


def main(arguments: list[str] | None = None) -> int:
    """Update or check the documents, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check")
    args = parser.parse_args(arguments)
    differing = []
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        new = rewritten(text, "../" * name.count("/"))
        if new != text:
            differing.append(name)
            if not args.check:
                (ROOT / name).write_text(new)
    if args.check and differing:
        print(f"{', '.join(differing)}: tables or figures differ from results: run python benchmarks/tables.py")
    return int(args.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
