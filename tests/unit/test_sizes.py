"""Functions are read in one pass, files hold one subject: neither grows past its limit."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.source_trees import nodes

ROOT = Path(__file__).parents[2]
FOLDERS = ("xray", "xray_runtime", "flows", "tasks", "deployments", "examples", ".ci")
"""Where the limits hold."""
MAX_FUNCTION_LINES, MAX_FILE_LINES = 60, 350


def too_long(name: str, source: str, tree: Sequence[ast.AST] = ()) -> Iterator[str]:
    """The file, and the functions in it, that are over their limit, a function's decorators not counted."""
    if len(source.splitlines()) > MAX_FILE_LINES:
        yield name
    for node in tree or ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES:
                yield f"{name}:{node.name}"


def test_long_functions_are_found() -> None:
    body = "\n".join(["    x = 1"] * (MAX_FUNCTION_LINES - 1))
    assert list(too_long("f", f"def f():\n{body}\n")) == []
    assert list(too_long("f", f"class C:\n  async def f():\n{body}\n    y = 2\n")) == ["f:f"]
    assert list(too_long("f", "x = 1\n" * MAX_FILE_LINES)) == []
    assert list(too_long("f", "x = 1\n" * (MAX_FILE_LINES + 1))) == ["f"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_and_files_keep_their_limits(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = [
        name
        for path in paths
        for name in too_long(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"), nodes(path))
    ]
    assert not found
