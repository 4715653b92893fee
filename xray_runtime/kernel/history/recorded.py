"""The signed chain of what `xray serve --record` keeps (see `kernel.history.recorded_rows`): one line for each segment.

A line names the segment's sha256 and the line before, so a segment that was edited, removed, replayed or put there
disagrees with it. Segments that are older than the retention are removed after a line that says so. The signed log
names the chain's end at the start and end of a recording, and each day: a chain that was cut short lacks it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import Timeout
from pydantic import Field

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.envelope import InTotoRecord
from xray_runtime.kernel.evidence.kinds.recorded import Recorded
from xray_runtime.kernel.evidence.lines import parse_line, read_signed_lines
from xray_runtime.kernel.evidence.view import EMPTY, ChainState, Line, SignedEntry, lock
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.history.recorded_rows import (
    KEYS,
    RECORDED,
    RecordedRow,
    UserKeys,
    about,
    read_segment,
    segment_bytes,
    segment_name,
)
from xray_runtime.kernel.store.identity import file_sha256

CHAIN = "chain.jsonl"


class Segment(SignedEntry):
    """A segment was written; the line's subject is its file."""

    action: Literal["segment"] = "segment"
    number: int
    rows: int
    lost: dict[str, int]
    """Reason → answers that should have been recorded since the segment before, and were not."""


class Expired(SignedEntry):
    """The segments up to this one were removed, because they were older than the retention."""

    action: Literal["expire"] = "expire"
    through: int


class ChainRecord(InTotoRecord[Annotated[Segment | Expired, Field(discriminator="action")]]):
    predicate_type: Literal["urn:xray:recorded:v1"] = Field(default="urn:xray:recorded:v1", alias="predicateType")


@dataclass
class ChainView(ChainState):
    """The state that the lines of a chain describe."""

    segments: dict[int, str] = field(default_factory=dict)
    """Number → sha256 of the segments that must be there."""
    made: dict[int, datetime] = field(default_factory=dict)
    """Number → when it was written."""
    last: int = 0
    """Number of the last segment, removed or not."""
    expired: int = 0
    """Number of the last segment that was removed."""
    lost: dict[str, int] = field(default_factory=dict)

    def add(self, line: Line) -> None:
        self.heads.append(line.sha256)
        entry = line.entry
        if isinstance(entry, Expired):
            self.segments = {number: sha for number, sha in self.segments.items() if number > entry.through}
            self.expired = entry.through
            return
        self.segments[entry.number] = line.files.get(segment_name(entry.number), "")
        self.made[entry.number] = datetime.fromisoformat(entry.at)
        self.last = entry.number
        for reason, count in entry.lost.items():
            self.lost[reason] = self.lost.get(reason, 0) + count


@contextlib.contextmanager
def recorded_lock(output: Path) -> Iterator[None]:
    """One process writes to what is recorded at a time. Raises ConfigError where another one does."""
    try:
        held = lock(output, "recorded").acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"--record: another `xray serve --record` records into {output}") from None
    with held:
        yield


def read_chain(output: Path) -> Iterator[Line]:
    """The lines of a chain, unchecked. Raises ValueError if the next one cannot be read."""
    return read_signed_lines(output / RECORDED / CHAIN, ChainRecord)


class SegmentWriter:
    """Writes the segments of one output directory; only one process may at a time.

    Half-written files that a crash left are overwritten or removed. Each method raises OSError while the disk is full
    or away, and may then be called again.

    Args:
        private: file of the signing key, by default that of the output directory; read for each segment: it may be
            rotated meanwhile.

    Raises:
        ValueError: the chain cannot be read.
    """

    def __init__(self, output: Path, private: Path | None, retention_days: int) -> None:
        self._output, self._directory, self._private = output, output / RECORDED, private
        self._retention_s = retention_days * 86400
        self._directory.mkdir(parents=True, exist_ok=True)
        self._anchored = EMPTY
        self.view = ChainView()
        try:
            for line in read_chain(output):
                self.view.add(line)
        except ValueError as error:
            # The next line overwrites one that a crash cut short.
            if not str(error).endswith("is cut short"):
                raise
        for path in self._directory.glob("*.writing-*"):
            path.unlink()
        self._remove_expired()

    def write(self, rows: Sequence[RecordedRow], lost: Mapping[str, int], about: dict[str, str]) -> None:
        """Write a segment; it is on disk and signed when this returns. `about`: further metadata of the file."""
        number = self.view.last + 1
        path = self._directory / segment_name(number)
        write_atomic(path, segment_bytes(number, rows, about))
        entry = Segment(number=number, rows=len(rows), lost=dict(lost))
        self._append(entry, {path.name: file_sha256(path)})

    def expire(self) -> None:
        """Remove the segments that are older than the retention."""
        oldest = time.time() - self._retention_s
        old = [number for number in self.view.segments if self.view.made[number].timestamp() < oldest]
        if old:
            self._append(Expired(through=max(old)), {})
            self._remove_expired()

    def anchor(self) -> None:
        """Name the end of the chain in the signed log of the output directory."""
        head = self.view.head
        if head != self._anchored:
            evidence().append(self._output, Recorded(entries=head.entries, head=head.sha256), private=self._private)
            self._anchored = head

    def _append(self, entry: Segment | Expired, files: Mapping[str, str]) -> None:
        path = self._directory / CHAIN
        text = evidence().append_line(self._output, path, ChainRecord, entry, files, private=self._private)
        self.view.add(parse_line(self.view.head.entries + 1, text, ChainRecord))

    def _remove_expired(self) -> None:
        for path in self._directory.glob("*.parquet"):
            if path.name <= segment_name(self.view.expired):
                path.unlink()


class RecordedReader:
    """Reads what was recorded; an audit says whether it is sound.

    Args:
        is_sound: whether the chain is; without it nothing is read.
    """

    def __init__(self, output: Path, *, is_sound: bool = True) -> None:
        self._directory = output / RECORDED
        self._keys = UserKeys(self._directory / KEYS, writable=False)
        self.chain = ChainView()
        self.answers = self.feedback = 0
        """Numbers of rows that `rows` has seen."""
        for line in read_chain(output) if is_sound else ():
            self.chain.add(line)

    def rows(self, user: str | None, leave_out: Container[str], limit: int | None) -> Iterator[dict[str, Any]]:
        """Records with their texts, newest first; `texts` is None where the user's key was deleted.

        Args:
            user: only those of this user, by name.
            leave_out: paths of segments, below the output directory, that are not read.
            limit: of rows; the others are counted.
        """
        only = self._keys.pseudonym(user) if user is not None else None
        shown = 0
        for number in reversed(self.chain.segments):
            name = segment_name(number)
            if f"{RECORDED}/{name}" in leave_out:
                continue
            for row in reversed(read_segment(self._directory / name)):
                if only not in (None, row["user"]):
                    continue
                self.answers += row["kind"] == "answer"
                self.feedback += row["kind"] == "feedback"
                if limit is None or shown < limit:
                    shown += 1
                    subject = about(row["kind"], row["id"], row["model"])
                    yield row | {"texts": self._keys.decrypt(row["user"], row["texts"], subject)}
