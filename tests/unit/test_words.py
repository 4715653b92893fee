"""Messages, help texts and findings are plain English: sentences begin with their subject, words are the field's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from xray_runtime.kernel.history.audit_check import meanings

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
FOLDERS = ("xray/cli", "xray_runtime", "flows", "tasks", "deployments")
SHOWING = {
    "print",
    "show",
    "print_indented",
    "_say",
    "note",
    "warning",
    "status",
    "update",
    "Finding",
    "prompt",
    "confirm",
}
"""Functions whose texts people read, beside errors that are raised."""
DESCRIBING = {"help", "description"}
BANNED = re.compile(
    # Openings that are no subject.
    r"(?:^|[.:;] )(?:Of|What|Who|Whoever|Whose|Whatever|Nobody|Nothing|of two|what it|who has)\b"
    # Words of our own, where the field has its own; see the glossary.
    r"|nothing is not allowed|\bis none of\b|\bis nothing that\b|\bsay --|\blies in\b|\bstands twice\b|\bgive_back\b"
    r"|\bblows?\b|\bcustody\b|\blends?\b|\bloans?\b"
    r"|\bmake room\b|\bdeals?\b|\bdealt\b|\bslumber|\bporter\b|\bwhoever\b|\bnobody\b|\bgoes on from\b|\bat hand\b"
    r"|\bbehind a port\b|\bnames nothing\b|\bis no (?:file|JSON|column|chat|statement|record)\b|\bcannot be had\b"
)


def literals(node: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of the strings in an expression; what an f-string fills in is left out."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.lineno, node.value
    elif isinstance(node, ast.JoinedStr):
        yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    else:
        for child in ast.iter_child_nodes(node):
            yield from literals(child)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """What people may read of a module: errors, what is printed, help, and the help of commands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from literals(node.exc)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in SHOWING or name.endswith("Error"):
                yield from (found for argument in node.args for found in literals(argument))
            yield from (found for k in node.keywords if k.arg in DESCRIBING for found in literals(k.value))


def commands(source: str) -> Iterator[tuple[int, str]]:
    """The help of the functions that Typer makes commands of: they name their exit codes."""
    for node in ast.parse(source).body:
        text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if text is not None and "Exit codes:" in text:
            yield node.lineno, text


def offences(source: str) -> list[str]:
    found = [*texts(source), *commands(source)]
    return [f"{line}: {text!r}" for line, text in found if " " in text and BANNED.search(" ".join(text.split()))]


MODULES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_messages_are_plain_english() -> None:
    found = [f"{path.relative_to(ROOT)}:{said}" for path in MODULES for said in offences(path.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_findings_are_plain_english() -> None:
    said = [text for found in meanings().values() for text in (found.meaning, found.remedy)]
    assert [text for text in said if BANNED.search(text)] == []


@pytest.mark.parametrize(
    "source",
    [
        'raise ConfigError("PREFECT_API_URL: nothing is not allowed: must be an address")',
        'raise ValueError(f"{name}: what it takes from was not made")',
        'typer.Option("--seed", help="Of everything that is drawn.")',
        'console.print("Whoever waits is told")',
        'log.warning("%s: nobody can be asked", stage)',
        'Finding("x", "y", f"the checkpoint {name} lies in another directory")',
        'def run() -> None:\n    """What a run does.\n\n    Exit codes: 0 done.\n    """',
    ],
)
def test_a_planted_phrase_is_found(source: str) -> None:
    assert offences(source)


def test_a_plain_message_passes() -> None:
    assert offences('raise ConfigError(f"{field}: {value} is not allowed: must be a whole number")') == []
