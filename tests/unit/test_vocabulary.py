"""Names, comments and docstrings of the code use the field's words; `test_words` checks the messages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
FOLDERS = [
    "xray",
    "flows",
    "tasks",
    "deployments",
    *sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "xray_runtime").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    ),
]
BANNED_NAMES = frozenset(
    (
        *("give_back", "take_back", "make_room", "take_in", "hand_out", "lend", "loan", "slumber", "porter", "carrier"),
        *(
            "bring",
            "brought",
            "write_whole",
            "end_marked",
            "was_stopped",
            "settle",
            "custody",
            "blow",
            "blows",
            "dealt",
        ),
        *("told", "said", "asked", "looked", "probed", "_cut", "_words", "_people"),
    )
)
"""Whole names, whatever their case, that say a metaphor or a participle where the field has a noun."""
BANNED_TYPES = frozenset(("Seen", "Since", "Made", "Found", "_Life"))
OPENING = re.compile(r"(?:Of|What|Who|Whoever|Whose|Nobody) ")
"""Openings of comments and docstrings that are no subject."""


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a module binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def prose(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of comments, and of strings that stand as statements."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()
    previous = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("# ")
            if line != previous + 1:
                yield line, text
            previous = line


def offences(source: str) -> list[str]:
    found = [
        f"{line}: {name}"
        for line, name in names(ast.parse(source))
        if name.lower() in BANNED_NAMES or name in BANNED_TYPES
    ]
    return found + [f"{line}: {text[:60]}" for line, text in prose(source) if OPENING.match(text)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_uses_the_fields_words(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{offence}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for offence in offences(path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    ["told = 1", "def give_back(x): ...", "class Seen: ...", "# Of each row the first.", '"""Whoever reads this."""'],
)
def test_a_planted_name_is_found(source: str) -> None:
    assert offences(source)


def test_a_plain_module_passes() -> None:
    assert offences('"""Rows of tokens."""\nheldout = 1  # the share of prompts\n') == []
