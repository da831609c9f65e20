"""The changelog begins with the version that is installed from here."""

import re

from tests.unit_tests.test_documented_commands import ROOT


def test_the_first_version_of_the_changelog_is_that_of_setup_py():
    version = re.search(r'version="([^"]+)"', (ROOT / "setup.py").read_text())
    first = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version is not None and first is not None
    assert first[1] == version[1]
