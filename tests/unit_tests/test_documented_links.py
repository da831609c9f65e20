"""Links between the documents lead to files and headings that are there, and so do paths of the way of a step."""

import re
from pathlib import Path

from tests.unit_tests.test_documented_commands import FENCED, PAGES, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as a forge makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path, text: str) -> list[str]:
    """The links in ``text`` that lead nowhere from ``page``."""
    found = []
    for link in LINK.findall(FENCED.sub("", text)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            found.append(link)
    return found


def test_links_lead_somewhere():
    assert {page.relative_to(ROOT).as_posix(): broken(page, page.read_text()) for page in PAGES} == {
        page.relative_to(ROOT).as_posix(): [] for page in PAGES
    }


def test_a_link_to_a_missing_file_or_heading_is_found():
    readme = ROOT / "README.md"
    assert broken(readme, "[a](docs/missing.md) [b](#no-such-heading) [c](#demo) [d](docs/using.md#reports)") == [
        "docs/missing.md",
        "#no-such-heading",
    ]


SHORT = {
    "fsdp/": "core/distributed/fsdp/src/megatron_fsdp/",
    "graphs/": "core/transformer/_cuda_graphs/",
    "core/": "core/",
}


def test_the_files_of_a_step_are_there():
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    paths = set(re.findall(rf"`((?:{'|'.join(SHORT)})[\w/]+\.py)`", page))
    assert len(paths) > 10
    folders = {path: SHORT[path.partition("/")[0] + "/"] + path.partition("/")[2] for path in paths}
    assert [path for path, full in folders.items() if not (ROOT / "megatron" / full).is_file()] == []
