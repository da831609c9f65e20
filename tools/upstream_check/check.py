"""Compares the megatron-core that the patch is made for with another one."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_fsdp_cuda_graphs.overlay import tree_file

from .reliances import Reliance, reliances
from .sources import Definition, Sources, bound_names, imported_from, parsed

# The module that the patch replaces whole: whoever imports from it gets the patch's names.
REPLACED = "megatron.core.transformer.cuda_graphs"


@dataclass
class Findings:
    """What was found, as lines to print.

    Attributes:
        broken: What the patch relies on and is gone, what others import from the patch and is not there, and
            definitions whose parameters changed.
        changed: Definitions that the patch takes the place of and whose code changed.
    """

    broken: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        sections = {"Would break:": self.broken, "Changed behind the patch, to be read again:": self.changed}
        lines = [line for title, texts in sections.items() if texts for line in (title, *map("  {}".format, texts), "")]
        return "\n".join([*lines, f"{len(self.broken)} would break, {len(self.changed)} to be read again"])


def check(ours: Sources, other: Sources) -> Findings:
    """Compare two megatron-cores by what the patch relies on.

    Args:
        ours: The megatron-core that the patch is made for.
    """
    findings = Findings()
    for each in reliances():
        if each.overridden:
            _compare(each, ours, other, findings)
        elif tree_file(each.module) is None or ours.file(each.module) is not None:
            findings.broken += _missing(each, ours, other)
    findings.broken += _importers(ours, other)
    _compare_replaced(ours, other, findings)
    return findings


def _missing(each: Reliance, ours: Sources, other: Sources) -> Iterator[str]:
    if not other.has_module(each.module):
        if ours.has_module(each.module):
            yield f"gone: {each}"
    elif each.path and not other.has(each.module, each.path) and ours.has(each.module, each.path):
        yield f"gone: {each}"


def _compare(each: Reliance, ours: Sources, other: Sources, findings: Findings) -> None:
    """Note how a definition differs that the patch takes the place of; the patch may also define what is nowhere."""
    before, after = (source.definition(each.module, each.path) for source in (ours, other))
    after = (other.definition(each.module, each.later) if each.later else None) or after
    if before is None:
        return
    if after is None:
        findings.broken.append(f"gone, nobody calls the patch's: {each}")
    elif _parameters(before) != _parameters(after) and not each.takes_any:
        findings.broken.append(f"other parameters ({_parameters(before)} -> {_parameters(after)}): {each}")
    elif ast.dump(before) != ast.dump(after):
        findings.changed.append(str(each))


def _parameters(definition: Definition) -> str:
    return "" if isinstance(definition, ast.ClassDef) else ast.unparse(definition.args)


def _importers(ours: Sources, other: Sources) -> Iterator[str]:
    """Yield the imports in ``other`` of names that the patch's replacement of a module does not have."""
    path = tree_file(REPLACED)
    assert path is not None
    there = set(bound_names(parsed(path).body))
    here = set(bound_names(tree.body)) if (tree := ours.tree(REPLACED)) else set()
    if "*" in there:  # names that are imported with `*`: those of megatron-core's module are tested one by one
        there |= here
    for file in other.files():
        if b"cuda_graphs" not in file.read_bytes():
            continue
        package = ".".join(file.relative_to(other.root).parts[:-1])
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ImportFrom) and imported_from(node, package) == REPLACED:
                for alias in node.names:
                    if alias.name not in there:
                        yield f"not in the patch: {REPLACED}.{alias.name}, which {file.relative_to(other.root)} imports"


def _compare_replaced(ours: Sources, other: Sources, findings: Findings) -> None:
    """Note how the public definitions of the replaced module differ: the patch has its own of them."""
    before, after = ours.tree(REPLACED), other.tree(REPLACED)
    if before is None or after is None:
        return
    for path in _public(before):
        _compare(Reliance("core/transformer/cuda_graphs.py", 1, REPLACED, path, overridden=True), ours, other, findings)
    for path in sorted(set(_public(after)) - set(_public(before))):
        findings.changed.append(f"new: {REPLACED}.{path}")


def _public(tree: ast.Module) -> Iterator[str]:
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            yield from (
                f"{statement.name}.{each.name}"
                for each in statement.body
                if isinstance(each, ast.FunctionDef) and (not each.name.startswith("_") or each.name == "__init__")
            )
        elif isinstance(statement, Definition) and not statement.name.startswith("_"):
            yield statement.name
