"""Writes README's tables and plot of a step from results of ``step_time.py``.

    python benchmarks/readme_table.py benchmarks/results/step_time.json ...    # take these from now on
    python benchmarks/readme_table.py                                          # write anew from those taken before
    python benchmarks/readme_table.py --check                                  # exit code 1 if README says otherwise

README names the files in the comment before the tables, relative to its folder. The plot lies beside the first file.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._step_time import markdown  # noqa: E402
from benchmarks._step_time.plot import plot  # noqa: E402

COMMENT = "<!-- made by benchmarks/readme_table.py from: {}-->"
END = "<!-- end of what readme_table.py made -->"
BLOCK = re.compile(COMMENT.format("(.*?)") + "\n(.*?)" + END, re.DOTALL)


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
    """Return ``readme`` with the tables of ``results``, files by their paths relative to README's folder."""
    tables = "\n".join(markdown.section(found) for found in results.values())
    picture = f"\n![a step's time]({_plot_of(results)})\n" if results else ""
    comment = COMMENT.format("".join(f"{name} " for name in results))
    block = f"{comment}\n{tables}{picture}{END}"
    return BLOCK.sub(lambda _: block, readme)


def draw(path: Path, results: Sequence[Mapping[str, Any]]) -> bool:
    """Draw all results to ``path``; return whether matplotlib is there to do it."""
    rows = {
        f"{markdown.heading_of(name, found)} ({found['hardware']})": of_one
        for found in results
        for name, of_one in found["configurations"].items()
    }
    return plot(path, rows, "one training step")


def _plot_of(results: Mapping[str, Any]) -> str:
    return str(Path(next(iter(results))).with_suffix(".png"))


def main() -> int:
    """Write or check README."""
    args = parse()
    readme = args.readme.read_text()
    folder = args.readme.resolve().parent
    names = [path.resolve().relative_to(folder).as_posix() for path in args.results] or files_named(readme)
    results = {name: json.loads((folder / name).read_text()) for name in names}
    files_named(readme)  # that there is a place for them
    new = rewritten(readme, results)
    if args.check:
        if new != readme:
            print(f"{args.readme.name} differs from {', '.join(names)}: run python benchmarks/readme_table.py")
        return int(new != readme)
    if results and not draw(folder / _plot_of(results), list(results.values())):
        print("no plot: matplotlib is not installed")
    args.readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
