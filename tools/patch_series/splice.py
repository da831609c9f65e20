"""Puts the definitions of a file of the patch in the places of those that they replace in megatron-core's file.

A file of the patch has ``class X(_upstream.X)``, and calls ``super().m()`` or ``_upstream.f()`` where it needs what it
replaces. A checkout has one class, and one function:

- a definition that does without the one it replaces takes its place;
- one that does something before or after it is written into it;
- otherwise megatron-core's stays in front of ours, as ``_original_m``.

What megatron-core does not have follows what it follows in our file.
"""

import ast
import re
from collections.abc import Callable, Collection, Iterator
from itertools import takewhile

from .imports import with_imports
from .source import Source, bound, first_line, is_text, parsed, used_names

Function = ast.FunctionDef
Nodes = dict[str, list[ast.stmt]]
SEE = "; see megatron-core"  # in docstrings of ours


def splice(theirs: str, ours: str, names: Collection[str] | None = None) -> str:
    """Return the text of megatron-core's file with definitions of ours in it.

    Args:
        names: ``f`` and ``Class.m`` of those that are taken of ours; None for all. What they use of ours beside what
            megatron-core has is taken too.

    Raises:
        ValueError: ``ours`` does not define one of ``names``, or has what cannot be put into another file.
    """
    source, own = Source(theirs), Source(ours)
    available = _available(own, source)
    wanted = _wanted(available, available if names is None else names, source)
    result = _Edited(source)
    definitions = [node for node in source.body if isinstance(node, Function | ast.ClassDef)]
    place = source.above(first_line(definitions[0])) - 1 if definitions else len(source.lines)

    def renamed(text: str) -> str:
        """Name what ``_upstream`` has as a checkout does."""
        return re.sub(r"\b_upstream\.(\w+)", lambda found: name_of(found[1]), text).replace(SEE, "")

    def name_of(name: str) -> str:
        return _original(name) if name in wanted and isinstance(source.names.get(name), Function) else name

    for node in own.body:
        name = next(iter(bound(node)), "")
        there = source.names.get(name)
        if isinstance(node, ast.ClassDef) and isinstance(there, ast.ClassDef):
            _merge(result, own, node, there, wanted, renamed)
        elif name not in wanted:
            continue
        elif isinstance(node, Function) and isinstance(there, Function):
            result.replace(there, _replacement(own, node, source, there, rf"_upstream\.{name}\b", renamed))
        elif isinstance(there, Function):  # it is wrapped
            result.replace(there, _kept(source, there) + "\n\n" + renamed(own.code(node)))
        else:
            result.insert(place, node, renamed(own.code(node)), gap=2)
            continue
        place = there.end_lineno or 0
    nodes = own.body if names is None else []
    imported = {name for node in nodes if isinstance(node, ast.ImportFrom) for name in bound(node)}
    moved = {name for name in imported if isinstance(source.names.get(name), Function | ast.ClassDef)}
    for name in moved:
        result.replace(source.names[name], "")
    used = {name for nodes in wanted.values() for node in nodes for name in used_names(node)}
    text = result.text()
    gone = wanted.keys() | used_names(parsed(theirs)) - used_names(parsed(text))
    return with_imports(text, own.body, used, moved, gone)


class _Edited:
    """megatron-core's file and the changes to it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._replaced: dict[int, tuple[int, str]] = {}
        self._inserted: dict[int, list[tuple[ast.stmt, str, int]]] = {}

    def replace(self, node: ast.stmt, text: str) -> None:
        end = node.end_lineno or 0
        if not text:
            end += sum(1 for _ in takewhile(lambda line: not line, self.source.lines[end:]))
        self._replaced[first_line(node)] = end, text

    def insert(self, behind: int, node: ast.stmt, text: str, gap: int) -> None:
        """Put ``text``, that of ``node``, behind the line with that number, ``gap`` lines from definitions."""
        self._inserted.setdefault(behind, []).append((node, text, gap))

    def text(self) -> str:
        return "".join(self._parts())

    def _parts(self) -> Iterator[str]:
        number = 0
        while number < len(self.source.lines):
            number, text = self._replaced.get(number + 1, (number + 1, self.source.text(number + 1, number + 1)))
            yield text
            yield from self._insertions(number)

    def _insertions(self, behind: int) -> Iterator[str]:
        inserted = self._inserted.get(behind, [])
        above = self.source.lines[behind - 1]
        begins = not above or above.endswith(":")  # a file's or a class's first definition comes next
        previous: ast.stmt | None = None
        for node, text, gap in inserted:
            apart = any(isinstance(each, Function | ast.ClassDef) for each in (node, previous))
            if (not begins) if previous is None else apart:
                yield "\n" * gap
            yield text
            previous = node
        if inserted and begins:
            yield "\n" * inserted[-1][2]


def _available(own: Source, source: Source) -> Nodes:
    """Return the statements of our file that a checkout may get, by ``f`` and ``Class.m``."""
    available: Nodes = {}
    for node in own.body:
        if isinstance(node, ast.ClassDef) and isinstance(source.names.get(node.name), ast.ClassDef):
            for member in node.body:
                for name in bound(member):
                    available.setdefault(f"{node.name}.{name}", []).append(member)
        elif isinstance(node, Function | ast.ClassDef | ast.Assign | ast.AnnAssign):
            for name in bound(node).keys() - {"_upstream"}:
                available.setdefault(name, []).append(node)
    return available


def _wanted(available: Nodes, names: Collection[str], source: Source) -> Nodes:
    """Return those of ``available`` that have ``names``, and what they use that megatron-core does not have."""
    new = {name: name for name in available if _of_class(source, *name.rpartition(".")[::2]) is None}
    for name, nodes in available.items():  # attributes that a method sets
        if owner := name.rpartition(".")[0]:
            new = {f"{owner}.{attribute}": name for node in nodes for attribute in _set_by(node)} | new
    wanted: Nodes = {}
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in available:
            raise ValueError(f"the patch does not define {name} anew")
        if name in wanted:
            continue
        wanted[name] = available[name]
        owner = name.rpartition(".")[0]
        for used in (used for node in available[name] for used in used_names(node)):
            todo += [new[each] for each in (used, f"{owner}.{used}") if each in new]
    return wanted


def _set_by(node: ast.stmt) -> list[str]:
    """Return the attributes that a method sets on its object."""
    nodes = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    return [each.attr for each in nodes if isinstance(each.value, ast.Name) and each.value.id == "self"]


def _of_class(source: Source, owner: str, name: str) -> ast.stmt | None:
    """Return what defines ``name`` in the class ``owner`` of megatron-core's, or in its file if that is empty."""
    if not owner:
        return source.names.get(name)
    node = source.names[owner]
    assert isinstance(node, ast.ClassDef)
    return next((member for member in node.body if name in bound(member)), None)


def _merge(
    result: _Edited, own: Source, node: ast.ClassDef, there: ast.ClassDef, wanted: Nodes, renamed: Callable[[str], str]
) -> None:
    """Put the members of our class into megatron-core's."""
    for base in map(ast.unparse, node.bases):
        if base.removeprefix("_upstream.") not in {node.name, *map(ast.unparse, there.bases)}:
            raise ValueError(f"{node.name} has a base {base}, which megatron-core's has not")
    source = result.source

    def in_class(text: str) -> str:
        return renamed(re.sub(r"\bsuper\(\)\.(\w+)", lambda found: called(found[1]), text))

    def called(name: str) -> str:
        there_too = isinstance(_of_class(source, node.name, name), Function)
        if not there_too:
            return f"super().{name}"
        return f"self.{_original(name) if f'{node.name}.{name}' in wanted else name}"

    head = list(takewhile(lambda member: not isinstance(member, Function), there.body))
    place = head[-1].end_lineno or 0 if head else first_line(there.body[0]) - 1
    for member in node.body:
        name = next(iter(bound(member)), "")
        if f"{node.name}.{name}" not in wanted:
            continue
        before = _of_class(source, node.name, name)
        if before is None:
            result.insert(place, member, in_class(own.code(member)), gap=1)
            continue
        if isinstance(member, Function) and isinstance(before, Function):
            result.replace(before, _replacement(own, member, source, before, rf"super\(\)\.{name}\b", in_class, node))
        else:
            result.replace(before, in_class(own.code(member)))
        place = before.end_lineno or 0


def _replacement(
    own: Source,
    node: Function,
    source: Source,
    there: Function,
    reference: str,
    renamed: Callable[[str], str],
    owner: ast.ClassDef | None = None,
) -> str:
    """Return what a checkout has in the place of megatron-core's ``there``: our ``node``, and it or its statements.

    Args:
        reference: A pattern for what ours calls megatron-core's.
        renamed: Names in the text of ours what a checkout calls otherwise.
    """
    text = renamed(own.code(node))
    references = len(re.findall(reference, own.code(owner) if owner else "\n".join(own.lines)))
    if not references:
        return text
    if references == 1:
        joined = _joined(own, node, source, there, reference, renamed)
        if joined is not None:
            return joined
    return _kept(source, there) + "\n" * (1 if there.col_offset else 2) + text


def _kept(source: Source, there: Function) -> str:
    """Return megatron-core's ``there`` under the name ``_original``."""
    original = source.text(first_line(there), there.end_lineno or 0)
    return re.sub(rf"(?m)^(\s*)def {there.name}\b", rf"\1def {_original(there.name)}", original, count=1)


def _joined(
    own: Source, node: Function, source: Source, there: Function, reference: str, renamed: Callable[[str], str]
) -> str | None:
    """Return megatron-core's function with what ours does before and after calling it; None if it cannot be had so."""
    decorators = {ast.unparse(each) for each in there.decorator_list}
    if not decorators <= {ast.unparse(each) for each in node.decorator_list} | {"torch.no_grad()"}:
        return None  # what they do comes before what ours does
    body, theirs = ([each for each in function.body if not is_text(each)] for function in (node, there))
    at = next((i for i, each in enumerate(body) if re.search(reference, ast.unparse(each))), 0)
    call, result = _call(body[at]), next(iter(bound(body[at])), None)
    if call is None or not re.fullmatch(reference, ast.unparse(call.func)):
        return None
    before, after, returns = body[:at], body[at + 1 :], _returns(theirs)
    first, end = source.above(first_line(theirs[0])), there.end_lineno or 0
    last = returns[-1].value if returns and returns[-1] is theirs[-1] else None
    if result is not None and [ast.unparse(each) for each in after] == [f"return {result}"]:
        after = []
    elif result is not None:  # what megatron-core's returns is changed
        if last is None or len(returns) > 1:
            return None
        end = first_line(returns[-1]) - 1
    elif isinstance(body[at], ast.Expr) and (returns if after else any(each.value for each in returns)):
        return None
    changed = _assigned(call, node, there)
    names = _names((*before, *after))
    local = _names((*before, *after, *theirs), ast.Store) - ({result} if result == _unparsed(last) else set())
    clash = names & _names(theirs) & local - _parameters(there)
    if changed is None or clash or names & _parameters(node) - _parameters(there):
        return None
    if changed.keys() & _names(after):
        return None
    indent = " " * (node.col_offset + 4)
    parts = [own.text(own.above(first_line(before[0])), own.above(body[at].lineno) - 1)] if before else []
    parts += [f"{indent}{name} = {value}\n" for name, value in changed.items()]
    rest = [f"{indent}{result} = {_unparsed(last)}\n"] if after and result not in (None, _unparsed(last)) else []
    rest += [own.text((body[at].end_lineno or 0) + 1, node.end_lineno or 0)] if after else []
    kept = source.text(first_line(there), first - 1), source.text(first, end)
    return kept[0] + renamed("".join(parts)) + kept[1] + renamed("".join(rest))


def _returns(body: list[ast.stmt]) -> list[ast.Return]:
    """Return the ``return`` statements of a function, without those of functions in it."""
    nodes: list[ast.AST] = list(body)
    for node in nodes:  # which grows
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            nodes += ast.iter_child_nodes(node)
    return sorted((node for node in nodes if isinstance(node, ast.Return)), key=lambda node: node.lineno)


def _unparsed(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def _call(node: ast.stmt) -> ast.Call | None:
    value = node.value if isinstance(node, ast.Expr | ast.Return | ast.Assign | ast.AnnAssign) else None
    return value if isinstance(value, ast.Call) else None


def _assigned(call: ast.Call, node: Function, there: Function) -> dict[str, str] | None:
    """Return the parameters of megatron-core's function that ours gives other values; None if both do not fit."""
    args, theirs = ([each.arg for each in function.args.args] for function in (node, there))
    if args != theirs[: len(args)] or node.args.posonlyargs:
        return None
    own = (node.args.vararg, node.args.kwarg)
    rest = [f"{stars}{each.arg}" for stars, each in zip(("*", "**"), own, strict=True) if each is not None]
    shift = 1 if there.col_offset else 0  # self
    given = [ast.unparse(each) for each in call.args]
    given += [f"**{ast.unparse(keyword.value)}" for keyword in call.keywords if not keyword.arg]
    values = dict(zip(theirs[shift:], [each for each in given if not each.startswith("*")], strict=False))
    values |= {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg}
    named = {*args[shift:], *(each.arg for each in node.args.kwonlyargs)}
    if [each for each in given if each.startswith("*")] != rest or values.keys() != named:
        return None
    return {name: value for name, value in values.items() if name != value}


def _parameters(function: Function) -> set[str]:
    return {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}


def _names(body: Collection[ast.stmt], context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """Return the names in statements, but for those that only comprehensions bind."""
    nodes = [each for stmt in body for each in ast.walk(stmt)]
    inner = {name for each in nodes if isinstance(each, ast.comprehension) for name in ast.walk(each.target)}
    found = [each for each in nodes if isinstance(each, ast.Name) and each not in inner]
    stored = {each.id for each in found if isinstance(each.ctx, ast.Store)}
    own = {each.id for each in inner if isinstance(each, ast.Name)} - stored
    return {each.id for each in found if isinstance(each.ctx, context)} - own


def _original(name: str) -> str:
    return f"_original_{name.strip('_')}"
