"""The programs that a config may run, and the directories that it may give them: those that the environment names."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

COMMANDS = "XRAY_ALLOWED_COMMANDS"
"""Commands as one would type them, separated by commas; in each, * stands for anything and ? for any character."""
PATHS = "XRAY_ALLOWED_PATHS"
"""Directories, separated as in PATH: `/home/me/agent` allows only that directory, `/home/me/*` also all below it."""


def check_command(command: Sequence[str], field: str, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a command that is not allowed: a config may come from a stranger. Raises ValueError."""
    text = shlex.join(command)
    entries = _entries(COMMANDS, ",", environment)
    if not any(text == entry or fnmatchcase(text, entry) for entry in entries):
        # A comma would end the entry.
        _refuse(field, text, COMMANDS, ",", entries, text.replace(",", "?"))


def check_path(path: str, field: str, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a directory that is not allowed. Raises ValueError: one line that says how to allow it."""
    entries = _entries(PATHS, os.pathsep, environment)
    if not any(_is_in(path, entry) for entry in entries):
        _refuse(field, path, PATHS, os.pathsep, entries, os.path.realpath(path))


def _entries(variable: str, separator: str, environment: Mapping[str, str]) -> list[str]:
    return [entry for part in environment.get(variable, "").split(separator) if (entry := part.strip())]


def _is_in(path: str, entry: str) -> bool:
    """Whether an entry allows a directory, wherever its links lead."""
    target, above = os.path.realpath(path), os.path.realpath(entry.removesuffix("/*") or "/")
    return target == above or (entry.endswith("/*") and os.path.commonpath([target, above]) == above)


def _refuse(field: str, value: str, variable: str, separator: str, entries: list[str], entry: str) -> None:
    setting = shlex.quote(separator.join([*entries, entry]))
    raise ValueError(
        f"{field} = {value!r} is not allowed: {variable} in the environment allows "
        f"{separator.join(entries) or 'nothing'}; to allow it: {variable}={setting}"
    )
