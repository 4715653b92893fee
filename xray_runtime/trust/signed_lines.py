"""Writing files of signed lines; see `kernel.evidence.lines`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xray_runtime.kernel.evidence.statement import InTotoRecord, StatementSubject
from xray_runtime.kernel.evidence.view import START
from xray_runtime.kernel.files import sync
from xray_runtime.trust.signing import PAYLOAD_TYPE, envelope


def signed_line(
    record: type[InTotoRecord[Any]], entry: Any, files: Mapping[str, str], private: Path, previous: str = START
) -> bytes:
    """A line as `append_signed_line` writes it, after the line with the digest `previous`."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    subject = [StatementSubject.of(name, sha) for name, sha in sorted(files.items())]
    dated = entry.model_copy(update={"previous": previous, "at": at})
    content = record.model_validate({"subject": subject, "predicate": dated}).to_bytes()
    return envelope(content, PAYLOAD_TYPE, private).encode() + b"\n"


def append_signed_line(
    path: Path, record: type[InTotoRecord[Any]], entry: Any, files: Mapping[str, str], private: Path
) -> bytes:
    """Sign an entry and write it to the end of a file: after a crash it is there whole or not at all. Returns the line.

    Args:
        record: the kind of statement that lines of this file are.
        entry: one of its predicates; its `previous` and `at` are set here.
        files: name → sha256 of the subjects.
    """
    # A link is not followed.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "r+b") as file:
        end, last = _whole_end(file)
        previous = hashlib.sha256(last).hexdigest() if last else START
        line = signed_line(record, entry, files, private, previous)
        # Overwrite a line that a power cut left half written.
        file.truncate(end)
        file.seek(end)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    if end == 0:
        sync(path.parent)
    return line


def _whole_end(file: Any) -> tuple[int, bytes]:
    """(where the last whole line ends, that line), read from the end of the file."""
    position, tail = file.seek(0, os.SEEK_END), b""
    while position > 0 and tail.count(b"\n") < 2:
        step = min(position, 1 << 16)
        position = file.seek(position - step)
        tail = file.read(step) + tail
    complete = tail[: tail.rfind(b"\n") + 1]
    return position + len(complete), complete[complete.rfind(b"\n", 0, -1) + 1 :]
