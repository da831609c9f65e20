"""Make the example scripts importable."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch) -> Path:
    """Add the folder of the examples to ``sys.path``, and return it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return EXAMPLES
