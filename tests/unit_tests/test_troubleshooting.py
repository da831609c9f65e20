"""docs/troubleshooting.md has every error that the patch raises, and none that it does not."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
SOURCES = [
    path
    for folder in ("megatron", "megatron_fsdp_cuda_graphs", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "cpu_backend" not in path.relative_to(ROOT).parts
]
VARIES = "…"
SHORTEST = 12  # characters that do not vary; what has fewer is all made elsewhere, as flags' words are


def text_of(node, constants):
    """The text that an expression makes, with VARIES for all that is not in it; None if it makes none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [VARIES if isinstance(each, ast.FormattedValue) else text_of(each, constants) for each in node.values]
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(text_of(side, constants) or VARIES for side in (node.left, node.right))
    return constants.get(node.id) if isinstance(node, ast.Name) else None


def of_file(path):
    """The texts of errors that a file raises, and all texts in it."""
    tree = ast.parse(path.read_bytes())
    constants: dict[str, str | None] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = text_of(node.value, constants)
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    texts = [text_of(call.args[0], constants) for call in raised if call.args]
    everywhere = [text_of(node, constants) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)]
    return [text for text in texts if text and len(text.replace(VARIES, "")) >= SHORTEST], filter(None, everywhere)


RAISED, EVERYWHERE = zip(*map(of_file, SOURCES), strict=True)
TEXTS = sorted({text for texts in RAISED for text in texts})
EVERY_TEXT = {text for texts in EVERYWHERE for text in texts if len(text) >= SHORTEST}
ENTRIES = re.findall(r"^- `(.+)`$", PAGE.read_text(), re.MULTILINE)


def fits(entry, text):
    """Whether ``text`` has the parts of ``entry`` that are the same in every message, in their order."""
    at = 0
    for part in entry.split(VARIES):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def test_every_error_is_in_the_page():
    absent = [text for text in TEXTS if not any(fits(entry, text) for entry in ENTRIES)]
    assert not absent, "\n".join(["errors that docs/troubleshooting.md does not have:", *absent])


def test_every_entry_is_a_text_of_the_patch():
    gone = [entry for entry in ENTRIES if not any(fits(entry, text) for text in EVERY_TEXT)]
    assert not gone, "\n".join(["entries of docs/troubleshooting.md that the patch does not say:", *gone])


def test_entries_are_told_apart():
    assert len(set(ENTRIES)) == len(ENTRIES) > 100 < len(TEXTS)
    assert all(len(entry.replace(VARIES, "")) >= SHORTEST for entry in ENTRIES)
