"""Writes the tables of documents that are made from files of results.

    python benchmarks/tables.py            # write all anew
    python benchmarks/tables.py --check    # exit code 1 if a document says otherwise

A table is between two comments, of which the first says what it is about (``times``, ``memory``, ``equality``) and from
which files it is made, relative to the repository; folders stand for the files in them.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._step_time.configurations import DESCRIPTIONS  # noqa: E402

DOCUMENTS = ("README.md", "docs/performance.md", "docs/measurements.md")
COMMENT = "<!-- {} by benchmarks/tables.py from: {} -->"
END = "<!-- end of what tables.py made -->"
BLOCK = re.compile(COMMENT.format(r"(\w+)", "(.*?)") + "\n(.*?)" + END, re.DOTALL)

Row = tuple[str, ...]
Results = Mapping[str, Mapping[str, Any]]


def times(results: Results) -> Iterator[Row]:
    """Yield a row for each configuration that was trained eagerly and with graphs."""
    yield (
        *("model", "GPUs, results", "eager: ms", "graphs: ms", "time / eager", "time / full iteration"),
        *("memory / eager", "steps equal to eager's"),
    )
    for where, configuration, suffix, variants in _trained(results):
        eager, graphs, whole = (variants.get(f"{name}{suffix}", {}) for name in ("eager", "native", "full_iteration"))
        yield (
            _model(configuration, suffix),
            where,
            f"{eager['ms']:.1f}",
            f"{graphs['ms']:.1f}",
            _ratio(graphs["ms"], eager["ms"]),
            "cannot be captured" if "error" in whole else _ratio(graphs["ms"], whole.get("ms")),
            _ratio(graphs["reserved_mib"], eager["reserved_mib"]),
            f"{graphs['equal_steps']} of {graphs['steps']}",
        )


def memory(results: Results) -> Iterator[Row]:
    """Yield a row for each variant of a configuration."""
    yield (
        "model",
        "GPUs, results",
        "",
        "reserved: MiB",
        "tensors at their peak: MiB",
        "pools of graphs: MiB",
        "capture: s",
    )
    for where, configuration, suffix, variants in _trained(results):
        for name in ("eager", "native", "full_iteration"):
            row = variants.get(f"{name}{suffix}", {})
            if "ms" in row:
                keys = ("reserved_mib", "max_allocated_mib", "graph_pools_mib")
                figures = (f"{row[key]:.0f}" for key in keys)
                yield _model(configuration, suffix), where, NAMES[name], *figures, f"{row['capture_seconds']:.2f}"


def equality(results: Results) -> Iterator[Row]:
    """Yield a row for each file of tests and each engine: how many cases are equal to eager training."""
    yield "tests", "GPUs, results", "engine", "equal to eager training", "others"
    for path, found in results.items():
        if "results" not in found:
            continue
        groups: dict[tuple[str, str], Counter] = {}
        for each in found["results"]:
            outcome = "failed" if each["error"] else "differs" if each["differences"] else "equal"
            groups.setdefault((each["tests"], each["engine"]), Counter())[outcome] += 1
        for (tests, engine), counts in sorted(groups.items()):
            others = ", ".join(f"{counts[name]} {name}" for name in ("differs", "failed") if counts[name])
            yield tests, _where(path, found), engine, f"{counts['equal']} of {counts.total()}", others


KINDS = {"times": times, "memory": memory, "equality": equality}
NAMES = {"eager": "eager", "native": "graphs", "full_iteration": "full iteration"}


def _trained(results: Results) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield the pairs of variants that are compared: where they ran, what, the suffix of both, and all variants."""
    for path, found in results.items():
        for configuration, rows in sorted(found.get("configurations", {}).items()):
            variants = {row["variant"]: row for row in rows}
            suffixes = [name.removeprefix("native") for name in variants if name.startswith("native")]
            for suffix in suffixes:
                if "ms" in variants.get(f"eager{suffix}", {}) and "ms" in variants[f"native{suffix}"]:
                    yield _where(path, found), configuration, suffix, variants


def _model(configuration: str, suffix: str) -> str:
    name, _, flags = configuration.partition(":")
    said = {"+grouped": "`--moe-use-grouped-tensor`", "+optimizer": "`--optimizer-cuda-graph`"}
    return ", ".join(filter(None, [f"{name}: {DESCRIPTIONS[name]}", f"`{flags}`" * bool(flags), said.get(suffix, "")]))


def _where(path: str, found: Mapping[str, Any]) -> str:
    return f"[{found['hardware']}]({path})"


def _ratio(value: float, base: float | None) -> str:
    return f"{value / base:.2f}" if base else "not run"


def rewritten(text: str, up: str = "") -> str:
    """Return the text of a document with its tables written anew.

    Args:
        text: The document.
        up: The way from its folder to the repository, as links need it.
    """

    def block(found: re.Match) -> str:
        kind, names = found[1], found[2].split()
        files = [file for name in names for file in _files(ROOT / name)]
        results = {f"{up}{file.relative_to(ROOT).as_posix()}": json.loads(file.read_text()) for file in files}
        header, *rows = KINDS[kind](results)
        lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
        lines.insert(1, "|---" * len(header) + "|")
        return "\n".join([COMMENT.format(kind, found[2]), *lines, END])

    return BLOCK.sub(block, text)


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.json")) if path.is_dir() else [path]


def main(arguments: list[str] | None = None) -> int:
    """Write or check the documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
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
        print(f"{', '.join(differing)}: tables differ from results: run python benchmarks/tables.py")
    return int(args.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
