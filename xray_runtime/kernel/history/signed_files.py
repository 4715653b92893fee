"""Files of one directory that are signed whenever they change.

    SIGNED   a signed statement with the sha256 of every file and the number of changes so far, replaced at each change

A change is written beside its file, then signed, then put in place: after a crash it is there whole, or not at all. The
signed log names the statement every LOG_EVERY changes, and when `log_signed` is called: an older copy of the whole
directory lacks changes that the log knows of.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal

from pydantic import Field

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.envelope import InTotoRecord, Verifier
from xray_runtime.kernel.evidence.kinds.signed_files import FilesSigned, SignedDirectories
from xray_runtime.kernel.evidence.lines import read_signed_lines, sound_lines
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.evidence.view import START, LogView, SignedEntry
from xray_runtime.kernel.files import sync, write_atomic
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.store.checkpoints import read_bounded

SIGNED = "signed.json"
NEXT = ".next"
"""Ends the name of a change until it is in place."""
LOG_EVERY = 25
MAX_BYTES = 2**30


class Changed(SignedEntry):
    """Files were changed; the statement's subjects are all that there are."""

    action: Literal["change"] = "change"
    changes: int


class ChangedRecord(InTotoRecord[Changed]):
    predicate_type: Literal["urn:xray:files:v1"] = Field(default="urn:xray:files:v1", alias="predicateType")


@dataclass(frozen=True)
class _Signed:
    """The content of a directory's statement."""

    changes: int = 0
    statement: str = START
    """Its sha256."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name → sha256."""


def read_signed(
    output: Path, directory: Path, names: Sequence[str], verifier: Verifier | None = None
) -> dict[str, bytes]:
    """Name → content of the files `names` in a directory below `output`; empty where there is none.

    By default the keys count that the output directory trusts. Raises ConfigError where somebody else changed a file,
    or the statement, or put an older copy in their place.
    """
    log = view(output)
    signed = _signed(output, directory, log, verifier)
    return {name: _content(output, directory / name, signed.files.get(name), log) for name in names}


def write_signed(output: Path, directory: Path, contents: Mapping[str, bytes]) -> None:
    """Change files, all at once; only one process may at a time. Raises ConfigError as `read_signed`."""
    log = view(output)
    signed = _signed(output, directory, log)
    for name in contents:
        _content(output, directory / name, signed.files.get(name), log)
    files = {**signed.files, **{name: sha256(content).hexdigest() for name, content in contents.items()}}
    for name, content in contents.items():
        write_atomic(directory / f"{name}{NEXT}", content)
    statement, changes = directory / f"{SIGNED}{NEXT}", signed.changes + 1
    statement.unlink(missing_ok=True)
    line = evidence().append_line(output, statement, ChangedRecord, Changed(changes=changes), files)
    for name in (SIGNED, *contents):
        os.replace(directory / f"{name}{NEXT}", directory / name)
    sync(directory)
    _log(output, directory, log, _Signed(changes, sha256(line).hexdigest()), LOG_EVERY)


def log_signed(output: Path, directory: Path) -> None:
    """Have the signed log name the files of a directory as they are, unless it does. Raises as `read_signed`."""
    log = view(output)
    _log(output, directory, log, _signed(output, directory, log), 1)


def _log(output: Path, directory: Path, log: LogView, signed: _Signed, at_least: int) -> None:
    """Have the log name a statement, if it lacks at least so many changes."""
    name = directory.relative_to(output).as_posix()
    known = log.state(SignedDirectories).get(name)
    if signed.changes - (known.changes if known is not None else 0) >= at_least:
        entry = FilesSigned(directory=name, changes=signed.changes, statement=signed.statement)
        evidence().append(output, entry)


def _signed(output: Path, directory: Path, log: LogView, verifier: Verifier | None = None) -> _Signed:
    path, signed = directory / SIGNED, _Signed()
    if os.path.lexists(path):
        try:
            verifier = verifier or evidence().verifier(output)
            [line] = sound_lines(read_signed_lines(path, ChangedRecord), verifier)
        except (OSError, ValueError) as error:
            reason = first_line(error)
            raise ConfigError(f"{path}: it is not sound ({reason}); restore it from a copy") from None
        signed = _Signed(line.entry.changes, line.sha256, line.files)
    known = log.state(SignedDirectories).get(directory.relative_to(output).as_posix())
    if known is not None and known.changes >= signed.changes and known.statement != signed.statement:
        raise ConfigError(
            f"{path}: it counts {signed.changes} changes, the signed log {known.changes}: restore the newest copy"
        )
    return signed


def _content(output: Path, path: Path, expected: str | None, log: LogView) -> bytes:
    change = path.with_name(f"{path.name}{NEXT}")
    for candidate in (path, change):
        try:
            content = read_bounded(candidate, MAX_BYTES)
        except (OSError, ValueError):
            content = None
        if content is not None and expected == sha256(content).hexdigest():
            return content
    is_erased = path.relative_to(output).as_posix() in log.erased
    if not os.path.lexists(path) and (expected is None or is_erased):
        return b""
    raise ConfigError(f"{path}: somebody else changed it: {SIGNED} does not have its bytes; restore it from a copy")
