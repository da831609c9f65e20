"""Definitions of ours stand in the places of those that they replace."""

from textwrap import dedent, indent

import pytest

from tools.patch_series.narrow import with_sorted_imports
from tools.patch_series.splice import splice

BEGIN = "_upstream = extend(__name__)\n"


def spliced(theirs, ours, names=None):
    return splice(dedent(theirs).lstrip(), BEGIN + dedent(ours), names)


def spliced_in_order(theirs, ours):
    return with_sorted_imports({"": spliced(theirs, ours)})[""]


def test_a_definition_takes_the_place_of_the_one_that_it_does_without():
    text = spliced(
        """
        def first():
            return 1


        # Of the second.
        def second():
            return 2
        """,
        """
        def first():
            return 3
        """,
    )
    assert (
        text
        == dedent(
            """
        def first():
            return 3


        # Of the second.
        def second():
            return 2
        """
        ).lstrip()
    )


THEIRS = '''
    import os


    class Tool:
        """A tool."""

        size = 1

        def __init__(self, name, count=1):
            """Make it."""
            super().__init__()
            self.name = name

        def sharpen(self, by):
            if by > 9:
                return 9
            # Slowly.
            return by

        def rest(self):
            hours = 8
            return hours
    '''


def methods(ours):
    """The lines of megatron-core's file with methods of ours in its class."""
    text = spliced(THEIRS, "class Tool(_upstream.Tool):\n" + indent(dedent(ours), " " * 4))
    return [line for line in text.splitlines() if line]


def between(lines, first, last):
    begin = lines.index(first)
    return lines[begin : lines.index(last, begin) + 1]


def test_what_ours_does_before_and_after_is_written_into_the_method():
    lines = methods("""
        def __init__(self, name, *args, **kwargs):
            print(name)
            super().__init__(name.lower(), *args, **kwargs)
            self.own = 2
    """)
    assert between(lines, "    def __init__(self, name, count=1):", "        self.own = 2") == [
        "    def __init__(self, name, count=1):",
        '        """Make it."""',
        "        print(name)",
        "        name = name.lower()",
        "        super().__init__()",
        "        self.name = name",
        "        self.own = 2",
    ]


def test_a_condition_may_come_before_all_of_its_returns():
    lines = methods("""
        def sharpen(self, by):
            if not by:
                return 0
            # Only then.
            sharp: int = super().sharpen(by)
            return sharp
    """)
    assert between(lines, "    def sharpen(self, by):", "        return by") == [
        "    def sharpen(self, by):",
        "        if not by:",
        "            return 0",
        "        if by > 9:",
        "            return 9",
        "        # Slowly.",
        "        return by",
    ]


def test_what_it_returns_may_be_changed_if_it_returns_at_its_end_only():
    lines = methods("""
        def rest(self):
            found = super().rest()
            return found + 1
    """)
    assert between(lines, "    def rest(self):", "        return found + 1") == [
        "    def rest(self):",
        "        hours = 8",
        "        found = hours",
        "        return found + 1",
    ]


@pytest.mark.parametrize(
    "ours",
    [
        "sharp = super().sharpen(by); return sharp + 1",  # it returns in the middle
        "with lock: return super().sharpen(by)",
        "return super().sharpen(by) + super().sharpen(by)",
    ],
)
def test_otherwise_it_stays_under_a_name_of_its_own(ours):
    lines = methods(f"""
        def sharpen(self, by):
            {ours}
    """)
    assert between(lines, "    def _original_sharpen(self, by):", "    def sharpen(self, by):")[:3] == [
        "    def _original_sharpen(self, by):",
        "        if by > 9:",
        "            return 9",
    ]
    assert any("self._original_sharpen(by)" in line for line in lines)


def test_what_ours_does_stays_outside_of_a_decorator():
    text = spliced(
        """
        class Tool:
            @counted
            def use(self):
                self.sharp = False
        """,
        """
        class Tool(_upstream.Tool):
            def use(self):
                super().use()
                self.uses = 0
        """,
    )
    assert (
        text
        == dedent(
            """
        class Tool:
            @counted
            def _original_use(self):
                self.sharp = False

            def use(self):
                self._original_use()
                self.uses = 0
        """
        ).lstrip()
    )


def test_a_variable_of_both_is_not_mixed_up():
    lines = methods("""
        def rest(self):
            hours = 7
            super().rest()
            print(hours)
    """)
    assert "    def _original_rest(self):" in lines
    lines = methods("""
        def sharpen(self, by):
            with_hours = [by for by in range(3)]
            return super().sharpen(by)
    """)
    assert "    def _original_sharpen(self, by):" not in lines


def test_new_names_follow_what_they_follow_in_our_file():
    lines = methods("""
        own: int = 3

        def rest(self):
            return self._hours()

        def _hours(self):
            return 1
    """)
    assert between(lines, "    size = 1", "    def __init__(self, name, count=1):") == [
        "    size = 1",
        "    own: int = 3",
        "    def __init__(self, name, count=1):",
    ]
    assert lines[-4:] == [
        "    def rest(self):",
        "        return self._hours()",
        "    def _hours(self):",
        "        return 1",
    ]


def test_some_definitions_bring_what_they_use_of_ours_and_no_more():
    ours = """
    import json
    import re

    SIZE = 2


    class Tool(_upstream.Tool):
        _places = ()

        def sharpen(self, by):
            return json.dumps(by) + self._own(SIZE)

        def _own(self, size):
            return helper(size)

        def rest(self):
            return re.compile(self._places)


    def helper(size):
        return size


    def other():
        return 1
    """
    text = spliced(THEIRS, ours, ["Tool.sharpen"])
    assert "import json" in text
    for ours_too in ("SIZE = 2", "def _own", "def helper"):
        assert ours_too in text
    for left in ("import re", "_places", "re.compile", "def other"):
        assert left not in text
    with pytest.raises(ValueError, match=r"does not define Tool\.run anew"):
        spliced(THEIRS, ours, ["Tool.run"])


def test_a_base_that_megatron_core_does_not_have_is_refused():
    with pytest.raises(ValueError, match="Tool has a base Mixin"):
        spliced(THEIRS, "class Tool(Mixin, _upstream.Tool): pass")


def test_imports_are_sorted_into_those_of_the_file():
    text = spliced_in_order(
        """
        import os
        from typing import Any

        import torch

        from .there import a, z


        def first(): ...
        """,
        """
        import json
        from collections.abc import Iterable
        from typing import TYPE_CHECKING, Any

        from megatron.core import parallel_state

        from ..above import up
        from .there import B

        def first():
            return json, Any, Iterable, parallel_state, up, B

        """,
    )
    assert text.splitlines()[:12] == [
        "import json",
        "import os",
        "from collections.abc import Iterable",
        "from typing import Any",
        "",
        "import torch",
        "",
        "from megatron.core import parallel_state",
        "",
        "from ..above import up",
        "from .there import B, a, z",
        "",
    ]


def test_a_definition_that_ours_imports_goes_and_an_import_that_ours_defines():
    text = spliced_in_order(
        """
        from .there import a, b


        class Moved:
            pass


        def first():
            return Moved, a, b
        """,
        """
        from .new import Moved

        def a(): ...
        """,
    )
    assert (
        text
        == dedent(
            """
        from .new import Moved
        from .there import b


        def a(): ...


        def first():
            return Moved, a, b
        """
        ).lstrip()
    )


def test_wrapped_function_keeps_the_original_above_it():
    text = spliced(
        """
        from time import timed


        @timed
        def first():
            return 1
        """,
        """
        def steady(function):
            return function


        first = steady(_upstream.first)
        """,
    )
    assert text.index("def steady") < text.index("@timed\ndef _original_first():")
    assert text.endswith("return 1\n\n\nfirst = steady(_original_first)\n")
