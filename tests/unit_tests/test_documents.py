"""Test that documents have valid links and explain errors, and that tests or CI run all README commands."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
FENCED = re.compile(r"^ *```[a-z]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^ {4}((?:make|pip|python|git|torchrun) .+?)(?: {2,}#.*)?$", re.MULTILINE)
# Row prefixes in README's matrix, each with the prefix of a row in docs/compatibility.md.
VERIFIED = (
    ("dense", "--cuda-graph-modules not given"),
    ("mixture of experts", "--moe-use-grouped-tensor"),
    ("tensor and context parallelism", "--tensor-model-parallel-size"),
    ("tensor and context parallelism", "--context-parallel-size"),
    ("pipeline parallelism", "--pipeline-model-parallel-size"),
    ("expert parallelism, HSDP", "--expert-model-parallel-size"),
    ("expert parallelism, HSDP", "--num-distributed-optimizer-instances"),
    ("FP8", "--fp8-recipe delayed"),
    ("multi-token prediction", "--mtp-num-layers"),
    ("checkpoints", "--save"),
)
EXPLAINED = re.compile(r"^- `(.+)`$", re.MULTILINE)  # a message in docs/troubleshooting.md
CI, MAKEFILE = ".ci/run", "Makefile"
# Prefix of each command in the README, with the file that runs it.
RUN_BY = {
    "pip install -c constraints.txt": MAKEFILE,
    "pip uninstall": "tests/integration_tests/test_install.py",
    "python -m megatron_fsdp_cuda_graphs": "tests/integration_tests/test_install.py",
    "torchrun": "examples/launch_gpt.sh",
    "python -m tools.patch": "tests/support/patched_checkout.py",
    "make demo": CI,
    "make test": CI,
}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts generate them."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    """Return the links in ``text`` that do not resolve from ``page``."""
    found = []
    for link in LINK.findall(FENCED.sub("", text)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            found.append(link)
    return found


def row_of(text: str, start: str) -> list[str]:
    """Return the cells of the table row that starts with ``start`` and describes a supported case."""
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith(f"| {start}")]
    (row,) = [cells for cells in rows if cells[1].strip() not in ("refused", "fails")]
    return [cell.strip() for cell in row]


@pytest.mark.parametrize(("start", "flag"), VERIFIED)
def test_readme_names_the_hardware_of_the_table(start, flag):
    table = (ROOT / "docs" / "compatibility.md").read_text()
    cells = row_of(table, flag)[3:6]
    found = [name for name, cell in zip(("CPU", "H100", "H200"), cells, strict=True) if cell]
    assert row_of((ROOT / "README.md").read_text(), start)[-1] == ", ".join(found)


def texts(file: Path) -> Iterator[str]:
    """Yield the string literals of a Python file, with ``…`` in place of interpolated values."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def unknown_messages(page: str, known: list[str]) -> list[str]:
    """Return the messages on ``page`` that occur in no string of ``known``.

    The parts of a message around ``…`` may occur in different strings.
    """
    explained = EXPLAINED.findall(page)
    return [
        message
        for message in explained
        if not all(any(part.strip() in text for text in known) for part in message.split("…"))
    ]


def test_explained_errors_exist():
    files = [file for folder in ("megatron", "megatron_fsdp_cuda_graphs") for file in (ROOT / folder).rglob("*.py")]
    known = [text for file in files for text in texts(file)]
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert len(EXPLAINED.findall(page)) > 20
    assert unknown_messages(page, known) == []
    assert unknown_messages("- `rank … did not sneeze`", known) == ["rank … did not sneeze"]


def test_links_resolve():
    assert [(page.name, broken_links(page, page.read_text())) for page in PAGES] == [(page.name, []) for page in PAGES]


def test_broken_link_is_found():
    assert broken_links(PAGES[0], "[a](docs/no.md) [b](#no-heading) [c](docs/guide.md)") == [
        "docs/no.md",
        "#no-heading",
    ]


def test_readme_commands_are_run():
    commands = COMMAND.findall((ROOT / "README.md").read_text())
    runners = {command: [start for start in RUN_BY if command.startswith(start)] for command in commands}
    assert len(commands) > 6
    assert not [command for command, starts in runners.items() if not starts], "add them to RUN_BY"
    assert {start for starts in runners.values() for start in starts} == {*RUN_BY}
    assert all((ROOT / path).is_file() for path in RUN_BY.values())
