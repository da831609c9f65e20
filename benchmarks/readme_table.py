"""Writes README's table of a step from results of ``step_time.py``.

    python benchmarks/readme_table.py benchmarks/results/step_time.json ...    # take these from now on
    python benchmarks/readme_table.py                                          # write anew from those taken before
    python benchmarks/readme_table.py --check                                  # exit code 1 if README says otherwise

README names the files in the comment before the table, relative to its folder.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._step_time.configurations import DESCRIPTIONS  # noqa: E402

COMMENT = "<!-- made by benchmarks/readme_table.py from: {}-->"
END = "<!-- end of what readme_table.py made -->"
BLOCK = re.compile(COMMENT.format("(.*?)") + "\n(.*?)" + END, re.DOTALL)
HEADER = (
    "model",
    "GPUs, results",
    "eager: ms",
    "graphs: ms",
    "time / eager",
    "time / full iteration",
    "memory / eager",
    "steps equal to eager's",
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments.

    Raises:
        SystemExit: they are wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, help="JSON files of step_time.py")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true", help="write nothing")
    return parser.parse_args(arguments)


def files_named(readme: str) -> list[str]:
    """Return the files that ``readme`` was made from.

    Raises:
        ValueError: it has no block, or more than one.
    """
    found = BLOCK.findall(readme)
    if len(found) != 1:
        raise ValueError(f"README must have one line '{COMMENT.format('')}' and one '{END}' after it")
    return found[0][0].split()


def rewritten(readme: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return ``readme`` with the table of ``results``, files by their paths relative to README's folder."""
    rows = [
        cells(path, found["hardware"], name, {row["variant"]: row for row in variants})
        for path, found in results.items()
        for name, variants in sorted(found["configurations"].items())
    ]
    lines = [f"| {' | '.join(row)} |" for row in (HEADER, *rows)]
    lines.insert(1, "|---" * len(HEADER) + "|")
    comment = COMMENT.format("".join(f"{path} " for path in results))
    block = "\n".join([comment, *lines, END])
    return BLOCK.sub(lambda _: block, readme)


def cells(path: str, hardware: str, configuration: str, variants: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the row of a configuration that was trained eagerly and with graphs.

    Args:
        path: The file of results.
        hardware: What it was trained on.
        configuration: Its name, with flags after a colon.
        variants: Rows of ``step_time.py`` by the variants' names.
    """
    eager, graphs, whole = (variants.get(name, {}) for name in ("eager", "native", "full_iteration"))
    name, _, flags = configuration.partition(":")
    return (
        f"{name}: {DESCRIPTIONS[name]}" + f", `{flags}`" * bool(flags),
        f"[{hardware}]({path})",
        f"{eager['ms']:.1f}",
        f"{graphs['ms']:.1f}",
        _ratio(graphs["ms"], eager["ms"]),
        "cannot be captured" if "error" in whole else _ratio(graphs["ms"], whole.get("ms")),
        _ratio(graphs["reserved_mib"], eager["reserved_mib"]),
        f"{graphs['equal_steps']} of {graphs['steps']}",
    )


def _ratio(value: float, base: float | None) -> str:
    return f"{value / base:.2f}" if base else "not run"


def main() -> int:
    """Write or check README."""
    args = parse()
    readme = args.readme.read_text()
    folder = args.readme.resolve().parent
    names = [path.resolve().relative_to(folder).as_posix() for path in args.results] or files_named(readme)
    results = {name: json.loads((folder / name).read_text()) for name in names}
    files_named(readme)  # that there is a place for the table
    new = rewritten(readme, results)
    if args.check:
        if new != readme:
            print(f"{args.readme.name} differs from {', '.join(names)}: run python benchmarks/readme_table.py")
        return int(new != readme)
    args.readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
