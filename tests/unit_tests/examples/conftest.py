"""Makes the example scripts importable."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch) -> Path:
    """The folder of the examples, on ``sys.path``."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return EXAMPLES
