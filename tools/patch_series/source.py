"""The text of a Python file and its statements."""

import ast
from functools import cache
from itertools import takewhile

from tools.upstream_check.sources import bound_names


@cache
def parsed(text: str) -> ast.Module:
    """Return the syntax tree of ``text``, which must not be changed: each patch reads the same large files."""
    return ast.parse(text)


class Source:
    """The text of a file, and its statements.

    Attributes:
        lines: Its lines, the first of which has the number 1.
        names: With each name that it binds the statement that does.
    """

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.body = parsed(text).body
        self.names = {name: node for node in self.body for name in bound(node)}

    def text(self, first: int, last: int) -> str:
        """Return the text from line number ``first`` to line number ``last``."""
        return "".join(f"{line}\n" for line in self.lines[first - 1 : last])

    def code(self, node: ast.stmt) -> str:
        """Return the text of a statement, with its decorators and the comments right above it."""
        return self.text(self.above(first_line(node)), node.end_lineno or 0)

    def above(self, line: int) -> int:
        """Return the number of the first of the comments that end right above ``line``; ``line`` without comments."""
        before = reversed(self.lines[: line - 1])
        return line - sum(1 for _ in takewhile(lambda text: text.lstrip().startswith("#"), before))


def first_line(node: ast.stmt) -> int:
    """Return the number of the first line of a statement, its decorators included."""
    decorators = getattr(node, "decorator_list", ())
    return decorators[0].lineno if decorators else node.lineno


def bound(node: ast.stmt) -> dict[str, None]:
    """Return the names that a statement of a file or a class binds, in order."""
    return dict.fromkeys(bound_names([node]))


@cache
def used_names(node: ast.AST) -> frozenset[str]:
    """Return the names and attributes in a statement."""
    nodes = list(ast.walk(node))
    names = {each.id for each in nodes if isinstance(each, ast.Name)}
    return frozenset(names | {each.attr for each in nodes if isinstance(each, ast.Attribute)})


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
