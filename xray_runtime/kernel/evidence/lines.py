"""Reading files of signed lines: in-toto statements in DSSE envelopes; each names the digest of the one before."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, SerializeAsAny

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.envelope import InTotoRecord, Verifier, read_envelope, read_record
from xray_runtime.kernel.evidence.view import START, Line, SignedEntry
from xray_runtime.kernel.plugs import Registry
from xray_runtime.kernel.store.checkpoints import read_bounded

MAX_BYTES = 2**30
KINDS = Registry[tuple[type[SignedEntry], ...]](
    "kind of log entry", "xray_runtime.kernel.evidence.kinds", "KINDS", "xray.log_entries"
)


@cache
def entry_kinds() -> dict[str, type[SignedEntry]]:
    """Action → the kind of entry that has it."""
    kinds = [kind for name in KINDS for kind in KINDS.get(name)]
    return {action: kind for kind in kinds for action in get_args(kind.model_fields["action"].annotation)}


def _entry(value: object) -> SignedEntry:
    """An entry of the kind that its action names. Raises ValueError: there is none."""
    if isinstance(value, SignedEntry):
        return value
    kind = entry_kinds().get(str(value.get("action"))) if isinstance(value, dict) else None
    if kind is None:
        raise ValueError("its action belongs to no known kind of entry")
    return kind.model_validate(value)


class LogRecord(InTotoRecord[Annotated[SerializeAsAny[SignedEntry], BeforeValidator(_entry)]]):
    """A line of the log."""

    predicate_type: Literal["urn:xray:log:v1"] = Field(default="urn:xray:log:v1", alias="predicateType")


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
        envelope = read_envelope(text)
        entry = read_record(envelope, record)
    except ValueError as error:
        raise ValueError(f"line {number} is not an entry ({first_line(error)})") from None
    return Line(number, hashlib.sha256(text).hexdigest(), envelope, entry.predicate, entry.files)


class ChainCheck:
    """Checks that each line follows the one before, and was signed with a key that signed then.

    Args:
        verifier: None does not check signatures.
    """

    def __init__(self, verifier: Verifier | None) -> None:
        self._verifier = verifier
        self._previous, self.signer, self.retired = START, "", frozenset[str]()

    def resume(self, previous: str, signer: str, retired: frozenset[str]) -> None:
        """Continue behind lines that were checked: the last has this digest and signer, and these keys sign no more."""
        self._previous, self.signer, self.retired = previous, signer, retired

    def __call__(self, line: Line) -> None:
        """Check the next line. Raises ChainProblem; the line then does not count."""
        if line.entry.previous != self._previous:
            raise ChainProblem(line.number, "it does not follow the entry before it")
        if self._verifier is not None:
            try:
                key = self._verifier.check(line.envelope, line.entry.at)
            except ValueError as problem:
                raise ChainProblem(line.number, str(problem)) from None
            # A retired key signs no later entry, whatever time the entry claims.
            if key in self.retired:
                raise ChainProblem(line.number, "it was signed with a key that was retired before it")
            self.retired |= {self.signer} - {key}
            self.signer = key
        self._previous = line.sha256


def sound_lines(lines: Iterable[Line], verifier: Verifier | None) -> Iterator[Line]:
    """The lines, each once `ChainCheck` has checked it. Raises ChainProblem where the next one is not sound."""
    check = ChainCheck(verifier)
    for line in lines:
        check(line)
        yield line
