"""What ruff does to the files: lines as long as megatron-core's, which are shorter than ours, and imports in order."""

import ast
import io
import re
import subprocess
import sys
import tempfile
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .source import is_text

WIDTH = 100  # of megatron-core's lines
# The beginning of a paragraph of a docstring: an item of a list, a documented name, a heading.
ITEM = re.compile(r"[-*] |\d+\. |[\w*., `]+: |[A-Z]\w+:$")
# A line that is a part of a string, and how it goes on.
STRING = re.compile(r'(?P<indent> *)(?P<quote>[rf]?")(?P<text>[^"\\]*)(?P<end>".{0,8})')


def narrowed(texts: Mapping[str, str]) -> dict[str, str]:
    """Return Python files with lines of at most ``WIDTH`` characters, as far as that can be had.

    Raises:
        ValueError: ruff, which formats them, is not installed.
    """
    formatted = _by_ruff(texts, "format")
    return _by_ruff({name: "".join(_wrapped(text)) for name, text in formatted.items()}, "format")


def with_sorted_imports(texts: Mapping[str, str]) -> dict[str, str]:
    """Return files with their imports in the order that isort gives them, as most files of megatron-core have them."""
    options = ("--config", "lint.isort.known-first-party = ['megatron']")
    return _by_ruff(texts, "check", "--fix", "--exit-zero", "--select", "I", *options)


def _by_ruff(texts: Mapping[str, str], *command: str) -> dict[str, str]:
    if find_spec("ruff") is None:
        raise ValueError("ruff is needed to format the patches with megatron-core's length of lines: pip install ruff")
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, f"{number}.py") for number, name in enumerate(texts)}
        for name, file in files.items():
            file.write_text(texts[name])
        options = ("--isolated", "--quiet", "--line-length", str(WIDTH), "--target-version", "py312")
        subprocess.run([sys.executable, "-m", "ruff", *command, *options, folder], check=True)
        return {name: file.read_text() for name, file in files.items()}


def _wrapped(text: str) -> Iterator[str]:
    """Yield the lines of a file, with what a formatter leaves long broken: comments, docstrings and strings."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    texts = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr) and is_text(node))
    docstring = {line for node in texts for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    paragraph: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        comment = comments.get(number)
        alone = comment is not None and not comment.line[: comment.start[1]].strip()
        if paragraph and not (_goes_on(paragraph, line) and (number in docstring or alone)):
            yield from _lines(paragraph)
            paragraph = []
        if number in docstring or alone:
            paragraph.append(line)
        elif len(line) > WIDTH and comment is not None and "noqa" not in line and "type: ignore" not in line:
            indent = line[: len(line) - len(line.lstrip())]
            yield from _lines([indent + comment.string])
            yield line[: comment.start[1]].rstrip() + "\n"
        elif len(line) > WIDTH and (string := STRING.fullmatch(line)):
            yield from _parts(**string.groupdict())
        else:
            yield f"{line}\n"
    yield from _lines(paragraph)


def _goes_on(paragraph: list[str], line: str) -> bool:
    """Whether ``line`` belongs to the last paragraph of a docstring or comment."""
    indent, mark, text = _split(line)
    last_indent, last_mark, last = _split(paragraph[-1])
    begins = ITEM.match(text) or '"""' in text[:4] or not text or not last or text.startswith(("--", "=="))
    first_of_item = len(paragraph) == 1 and ITEM.match(last)
    return mark == last_mark and not begins and (indent == last_indent or bool(first_of_item and indent > last_indent))


def _split(line: str) -> tuple[str, str, str]:
    found = re.fullmatch(r"( *)(# ?)?(.*)", line)
    assert found is not None
    return found[1], found[2] or "", found[3]


def _lines(paragraph: list[str]) -> Iterator[str]:
    """Yield the lines of a paragraph, broken anew if one is too long."""
    if all(len(line) <= WIDTH for line in paragraph) or any(
        re.search(r"\S {2,}\S|[─│]|===", line) for line in paragraph
    ):
        yield from (f"{line}\n" for line in paragraph)
        return
    indent, mark, _ = _split(paragraph[0])
    deeper = (
        _split(paragraph[1])[0]
        if len(paragraph) > 1
        else indent + " " * (4 if ITEM.match(_split(paragraph[0])[2]) else 0)
    )
    words = " ".join(_split(line)[2] for line in paragraph)
    options: Any = {"initial_indent": indent + mark, "subsequent_indent": deeper + mark, "break_on_hyphens": False}
    closes = words.startswith('"""') and words.endswith('"""')  # on a line of its own then
    broken = textwrap.wrap(words.removesuffix('"""') if closes else words, WIDTH - 3 * closes, **options)
    yield from (f"{line}\n" for line in [*broken, *([f'{indent}"""'] if closes else [])])


def _parts(indent: str, quote: str, text: str, end: str) -> Iterator[str]:
    """Yield a part of a string in two lines, broken at a space outside of braces."""
    room = WIDTH - len(indent) - len(quote) - 1
    places = [i + 1 for i, letter in enumerate(text[:room]) if letter == " "]
    at = next((i for i in reversed(places) if text[:i].count("{") == text[:i].count("}")), len(text))
    yield f"{indent}{quote}{text[:at]}{end if at == len(text) else chr(34)}\n"
    if at < len(text):
        yield f"{indent}{quote}{text[at:]}{end}\n"
