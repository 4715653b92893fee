"""The product imports only what an installation of it brings: no tool of the tests, and nothing by chance."""

from __future__ import annotations

import ast
import contextlib
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.source_trees import nodes

ROOT = Path(__file__).parents[2]
PRODUCT = ("xray", "xray_runtime", "flows", "tasks", "deployments")


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def installed_by(requirements: Iterable[str]) -> set[str]:
    """Canonical names of the distributions that requirements bring, and of what those require."""
    found: set[tuple[str, str]] = set()
    left = [Requirement(text) for text in requirements]
    while left:
        wanted = left.pop()
        for extra in {"", *wanted.extras}:
            name = canonicalize_name(wanted.name)
            if (name, extra) in found:
                continue
            found.add((name, extra))
            with contextlib.suppress(PackageNotFoundError):  # the CUDA builds, where the CPU's are installed
                left += [
                    each
                    for each in map(Requirement, requires(name) or ())
                    if each.marker is None or each.marker.evaluate({"extra": extra})
                ]
    return {name for name, _ in found}


def declared() -> list[str]:
    """Requirements of users: the dependencies, and every extra but that of the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(text for name, texts in extras.items() if name != "dev" for text in texts)]


def test_all_that_is_imported_is_a_dependency() -> None:
    distributions, known = packages_distributions(), installed_by(declared())
    # Tools of the tests alone.
    assert not known & {"pytest", "hypothesis", "mypy"}
    missing = {}
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in imported(path) - set(sys.stdlib_module_names) - {*PRODUCT}:
                owners = distributions.get(name, [])
                if not known.intersection(map(canonicalize_name, owners)):
                    missing[name] = path.relative_to(ROOT).as_posix()
    assert missing == {}
