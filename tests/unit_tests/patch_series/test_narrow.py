"""Lines of the patches are as long as megatron-core's, and say the same."""

import ast
from textwrap import dedent

from tools.patch_series.narrow import narrowed

WIDE = dedent('''
    """What is said of this file in one line of a docstring, which is as long as lines of this project may be, 112."""

    # A comment that is longer than a line of megatron-core's may be, and that goes on in another line of the same one,
    # which is short.
    SIZE = 1  # a comment behind a statement, which is moved above it because there is no room for both of them there


    def first(name, other):
        """Return nothing; say what the arguments are.

        Args:
            name: What is documented in a line that is too long for megatron-core, with a second line that is indented
                further.
            other: Short.
        """
        if name:
            raise ValueError(
                f"an error whose message is in parts, as long as lines of this project, about {name} and {other + 1} "
                "and its end"
            )
        return {name: other for name, other in zip(name, other, strict=True) if name != other and not name.empty()}
''').lstrip()


def test_comments_docstrings_and_strings_are_broken():
    (text,) = narrowed({"wide": WIDE}).values()
    assert max(map(len, text.splitlines())) <= 100
    assert "# a comment behind a statement, which is moved above it because there is no room for both of them" in text
    assert "too long for megatron-core, with a second line\n            that is indented further.\n" in text
    assert "\n        other: Short.\n" in text


def test_what_is_computed_and_said_is_the_same():
    (text,) = narrowed({"wide": WIDE}).values()

    def said(source):
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = " ".join(node.value.split()) + " " * node.value.endswith(" ")
        return ast.dump(tree)

    assert said(text) == said(WIDE)
    assert narrowed({"narrow": text}) == {"narrow": text}
