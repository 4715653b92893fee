"""Files of one directory that are signed whenever they change.

    SIGNED   a signed statement with the sha256 of every file, replaced at each change

A change is written beside its file, then signed, then put in place: after a crash it is there whole, or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Literal

from pydantic import Field

from xray_runtime.config.validation import ConfigError
from xray_runtime.files import sync, write_atomic
from xray_runtime.lineage.keys import trusted_keys
from xray_runtime.lineage.log import view
from xray_runtime.lineage.log_entries import SignedEntry
from xray_runtime.lineage.signed_lines import append_signed_line, read_signed_lines, sound_lines
from xray_runtime.lineage.signing import Verifier, signing_key
from xray_runtime.lineage.statement import InTotoRecord

SIGNED = "signed.json"
NEXT = ".next"
"""Ends the name of a change until it is in place."""


class Changed(SignedEntry):
    """Files were changed; the statement's subjects are all that there are."""

    action: Literal["change"] = "change"


class ChangedRecord(InTotoRecord[Changed]):
    predicate_type: Literal["urn:xray:files:v1"] = Field("urn:xray:files:v1", alias="predicateType")


def read_signed(output: Path, directory: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Name → content of the files `names` in a directory below `output`; empty where there is none.

    Raises:
        ConfigError: somebody else changed one, or the statement.
    """
    signed = _signed(output, directory)
    return {name: _content(output, directory / name, signed.get(name)) for name in names}


def write_signed(output: Path, directory: Path, contents: Mapping[str, bytes]) -> None:
    """Change files, all at once; only one process may at a time.

    Raises:
        ConfigError: as `read_signed`.
    """
    signed = _signed(output, directory)
    for name in contents:
        _content(output, directory / name, signed.get(name))
    files = signed | {name: sha256(content).hexdigest() for name, content in contents.items()}
    for name, content in contents.items():
        write_atomic(directory / f"{name}{NEXT}", content)
    statement = directory / f"{SIGNED}{NEXT}"
    statement.unlink(missing_ok=True)
    append_signed_line(statement, ChangedRecord, Changed(), files, signing_key(output))
    for name in (SIGNED, *contents):
        os.replace(directory / f"{name}{NEXT}", directory / name)
    sync(directory)


def _signed(output: Path, directory: Path) -> dict[str, str]:
    """Name → sha256 by the signed statement; empty where there is none."""
    path = directory / SIGNED
    if not os.path.lexists(path):
        return {}
    try:
        [line] = sound_lines(read_signed_lines(path, ChangedRecord), Verifier(trusted_keys(output)))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path}: it is not sound ({reason}); restore it from a copy") from None
    return line.files


def _content(output: Path, path: Path, expected: str | None) -> bytes:
    change = path.with_name(f"{path.name}{NEXT}")
    for place in (path, change):
        found = place.read_bytes() if place.is_file() and not place.is_symlink() else None
        if found is not None and expected == sha256(found).hexdigest():
            return found
    if not os.path.lexists(path) and (expected is None or _is_erased(output, path)):
        return b""
    raise ConfigError(f"{path}: somebody else changed it: {SIGNED} does not have its bytes; restore it from a copy")


def _is_erased(output: Path, path: Path) -> bool:
    """Whether a withdrawal erased a file."""
    return path.relative_to(output).as_posix() in view(output).erased
