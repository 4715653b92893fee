"""`make mutants` draws from modules that exist, by tests that exist, and mutmut is told of each of them."""

from __future__ import annotations

import tomllib

from tests.mutants import GUARDS, ROOT


def test_every_guard_is_there_and_is_changed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"]
    changed = {path for path in settings["only_mutate"] if not path.endswith("*")}
    assert {path for path in changed if not (ROOT / path).is_file()} == set()
    assert {f"xray_runtime/{module}.py" for module in GUARDS} <= changed
    tests = {f"tests/unit/{path}" for paths in GUARDS.values() for path in paths.split()}
    assert {path for path in tests if not (ROOT / path).is_file()} == set()
