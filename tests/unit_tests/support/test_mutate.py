"""Which breaks of a file the mutation runner tries."""

from pathlib import Path

import pytest

from tests.support.mutate import breaks

FILE = Path("file.py")


def broken(source: str) -> list[str]:
    """The sources with one break each."""
    return [place.apply(source.encode()).decode() for place in breaks(FILE, source.encode())]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("if a is b: pass", ["if (not (a is b)): pass"]),
        ("c = a if b else 'é'", ["c = a if (not (b)) else 'é'"]),
        ("c = a and f(b)", ["c = ((a) or (f(b)))"]),
        ("c = [a for a in b if a]", ["c = [a for a in b if (not (a))]"]),
        ("é.f(a,\n  b)", ["pass"]),
        ("a.b = c", ["pass"]),
        ("a.b += c", ["pass"]),
        ("raise a", ["pass"]),
        ("a = True", ["a = False"]),
        ("a = 1", ["a = 2"]),
        ("a = b", []),
        ('"""A docstring."""', []),
        ("@d(frozen=True)\nclass A: b: int", []),
    ],
)
def test_each_break_changes_one_place(source, expected):
    assert broken(source) == expected


def test_breaks_come_in_the_order_of_lines_and_every_one_can_be_compiled():
    source = Path(breaks.__code__.co_filename).read_text()
    lines = [place.line for place in breaks(FILE, source.encode())]
    assert len(lines) > 40
    assert lines == sorted(lines)
    for changed in broken(source):
        compile(changed, "file.py", "exec")
