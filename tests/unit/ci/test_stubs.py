"""The stub of `xray` says what the code says."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest

import xray
from xray_runtime.kernel.graph import kinds


@pytest.fixture(scope="module")
def stub(load_script: Callable[..., Any]) -> str:
    return str(load_script("stubs").stub())


def test_the_stub_has_every_public_name(stub: str) -> None:
    tree = ast.parse(stub)
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names} - {None}
    shipped = {kind.name for kind in kinds.shipped()}
    assert shipped <= names
    assert set(xray._MODULES) | set(xray._SUBMODULES) <= names


def test_every_field_is_a_keyword_of_its_type(stub: str) -> None:
    functions = {node.name: node for node in ast.parse(stub).body if isinstance(node, ast.FunctionDef)}
    ppo = functions["ppo"].args
    assert [a.arg for a in ppo.args] == ["policy", "prompts", "reference", "rewards", "judges", "champion", "teacher"]
    types = {a.arg: ast.unparse(a.annotation) for a in ppo.kwonlyargs if a.annotation is not None}
    assert set(xray.ppo.all_field_names) <= {*types, "rewards", "judges"}
    assert types["schedule"] == "Literal['constant', 'linear', 'cosine']"
    assert types["clip_range_high"] == "float | None"
    assert types["advantages"] == "str | Callable[..., Any]"
    assert types["kl"] == "_KLConfig"
    assert re.search(r"clip_range: number, > 0.0, ≤ 1.0; default `0.2`\n +The policy ratio", stub)
