"""Each figure in a document comes from a file of results, in a generated table or with a source comment."""

import re

import pytest

from benchmarks.tables import BLOCK, FIGURE, ROOT
from tests.unit_tests.test_documents import FENCED

PAGES = ("flags", "how-it-works", "limits", "measurements", "performance", "scale", "using")
MEASURED = ("README.md", *(f"docs/{page}.md" for page in PAGES))
NOT_TEXT = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->")
NAMES = "torch|Torch|Python|megatron-core|TransformerEngine|newer|GPU-tested|capability|Apache"
VERSION = re.compile(rf"(\b({NAMES})\b[^.|]{{0,12}}?)[\d.]+(( to|,| and) [\d.]+)*")
# A decimal, or a number with a unit.
QUOTED = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+|(?:\.\d+)? (?:ms|us|s|MiB|GiB|GB|TB)\b)(?!\.\d)")


def without_source(text: str) -> list[str]:
    """Return the figures of a document without a source."""
    for pattern in (FENCED, BLOCK, FIGURE, NOT_TEXT):
        text = pattern.sub(" ", text)
    return QUOTED.findall(VERSION.sub(r"\1", text))


@pytest.mark.parametrize("name", MEASURED)
def test_every_figure_has_a_source(name):
    assert without_source((ROOT / name).read_text()) == []


@pytest.mark.parametrize("figure", ["takes 42.1 ms", "ratio 0.19", "1,234 MiB", "| 0.97 |", "(40.7 to"])
def test_figure_without_a_source_is_found(figure):
    assert len(without_source(f"It {figure} of it")) == 1


@pytest.mark.parametrize(
    "text",
    ["torch 2.11 to 2.15", "Python 3.12 or newer", "`0.5`", "42.1<!--=release/a b/ms--> ms", "16 layers", "40 of 40"],
)
def test_versions_and_sizes_need_no_source(text):
    assert without_source(text) == []
