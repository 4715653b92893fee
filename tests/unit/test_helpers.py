"""Helpers of tests stand in modules of helpers and in conftest files, never in another test module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
STATEMENT = re.compile(r"^ *(?:from|import) [^(\n]*(?:\([^)]*\))?", re.MULTILINE)
"""An import; most files have none with `test_` in it and need no parsing."""


def imports(tree: ast.AST) -> Iterator[str]:
    """Names of modules that a file imports, or imports from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_test_module(name: str) -> bool:
    path = TESTS.joinpath(*name.split(".")[1:]).with_suffix(".py")
    return name.startswith("tests.") and path.name.startswith("test_") and path.is_file()


def test_a_test_module_is_told_from_a_helper() -> None:
    here = "tests.unit.test_helpers"
    code = f"from {here} import imports\nimport {here}\nfrom tests.unit import test_helpers, conftest\nimport ast"
    assert [name for name in imports(ast.parse(code)) if is_test_module(name)] == [here] * 3


def test_no_test_imports_from_another_test_module() -> None:
    paths = sorted(TESTS.rglob("*.py"))
    assert len(paths) > 100
    found = [
        f"{path.relative_to(TESTS)}: {name}"
        for path in paths
        if "test_" in "".join(STATEMENT.findall(text := path.read_text(encoding="utf-8")))
        for name in imports(ast.parse(text))
        if is_test_module(name)
    ]
    assert found == []
