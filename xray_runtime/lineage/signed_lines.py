"""Files of signed lines: each is an in-toto statement in a DSSE envelope, and names the digest of the one before."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from xray_runtime.files import sync
from xray_runtime.lineage.log_entries import START, Line
from xray_runtime.lineage.signing import PAYLOAD_TYPE, SignatureProblem, Verifier, envelope
from xray_runtime.lineage.statement import InTotoRecord, Subject
from xray_runtime.store.checkpoints import read_bounded

MAX_BYTES = 2**30


class ChainProblem(ValueError):
    """A line that does not follow the one before, or is not signed as it must be."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


def read_signed_lines(path: Path, record: type[InTotoRecord[Any]]) -> Iterator[Line]:
    """The lines of a file, in order; there are none without the file. `sound_lines` checks them.

    Raises ValueError where the file, or the next line, cannot be read.
    """
    if not os.path.lexists(path):
        return
    try:
        content = read_bounded(path, MAX_BYTES)
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read ({error.strerror})") from None
    for number, text in enumerate(content.splitlines(keepends=True), start=1):
        yield parse_line(number, text, record)


def parse_line(number: int, text: bytes, record: type[InTotoRecord[Any]]) -> Line:
    """A line, unchecked. Raises ValueError if it is no entry."""
    if not text.endswith(b"\n"):
        raise ValueError(f"line {number} is cut short")
    try:
        found = record.model_validate_json(base64.b64decode(json.loads(text)["payload"], validate=True))
    except (ValidationError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"line {number} is no entry ({type(error).__name__})") from None
    files = {subject.name: subject.digest.sha256 for subject in found.subject}
    return Line(number, hashlib.sha256(text).hexdigest(), text, found.predicate, files)


def sound_lines(lines: Iterable[Line], verifier: Verifier | None) -> Iterator[Line]:
    """The lines, each once it is known to follow the one before and to be signed with a key that signed then.

    Raises ChainProblem where the next line is not sound. Without a verifier, signatures are not checked.
    """
    previous, signer, retired = START, "", set[str]()
    for line in lines:
        if line.entry.previous != previous:
            raise ChainProblem(line.number, "it does not follow the one before")
        if verifier is not None:
            try:
                key = verifier.check_envelope(line.text, line.entry.at)
            except SignatureProblem as problem:
                raise ChainProblem(line.number, str(problem)) from None
            # A retired key signs no later entry, whatever time the entry claims.
            if key in retired:
                raise ChainProblem(line.number, "it was signed with a key that was retired before it")
            retired |= {signer} - {key}
            signer = key
        previous = line.sha256
        yield line


def signed_line(
    record: type[InTotoRecord[Any]], entry: Any, files: Mapping[str, str], private: Path, previous: str = START
) -> bytes:
    """A line as `append_signed_line` writes it, after the line with the digest `previous`."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    subject = [Subject.of(name, sha) for name, sha in sorted(files.items())]
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
    whole = tail[: tail.rfind(b"\n") + 1]
    return position + len(whole), whole[whole.rfind(b"\n", 0, -1) + 1 :]
