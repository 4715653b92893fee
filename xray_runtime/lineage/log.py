"""The signed log of an output directory: what was published, decided and left there, in the order it happened.

    log.jsonl   one entry a line: an in-toto statement in a DSSE envelope, signed with the directory's key

Each entry names the digest of the line before it, so that nothing can be taken out, put in or changed; and it lists
files by sha256: the last entry about a file says what it must hold. What is there and in no entry, or in an entry and
not there, is found by an audit. A log that ends earlier than it did is told by whoever kept its head: MLflow, the
record of `--since-verified`, people (`xray audit --expect`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xray_runtime.files import sync
from xray_runtime.lineage.signing import PAYLOAD_TYPE, envelope
from xray_runtime.lineage.statement import InTotoRecord
from xray_runtime.store.checkpoints import CHECKPOINTS, read_bounded
from xray_runtime.store.identity import file_sha256
from xray_runtime.store.manifest import MANIFEST, Sha256

LOG = "log.jsonl"
LOCKS = "locks"
LIFECYCLE, REPORT = "lifecycle.json", "report.html"
"""What each run leaves at its place, for programs and for people."""
MAX_BYTES = 2**30
START = "0" * 64
"""What the first entry names as the one before."""


Action = Literal["register", "promote", "decline", "rollback", "prune", "rotate"]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    previous: Sha256 = START
    """sha256 of the line before; set as the entry is written."""
    at: str = ""


class Decision(_Entry):
    """One decision: `alias` of the registered model `name` now points to `version`, which is `checkpoint`.

    With `decline` it does not: a person said no. Two are about no model: with `prune`, `checkpoint` was removed from
    the store, and that was meant; with `rotate` it is the sha256 of the public key that signs from here on.
    """

    action: Action
    name: str
    alias: str
    version: str
    checkpoint: Sha256
    by: str
    note: str = ""
    gates: list[dict[str, Any]] = Field(default_factory=list)
    """What was checked, with the numbers."""
    gates_from: str = ""
    """Where the bounds of the gates come from."""
    page: int = 0
    """Of a registration: which form of `model_page` MLflow shows; 0: none."""
    evidence: dict[str, Sha256] = Field(default_factory=dict)
    """`evaluation`, `comparison` → the checkpoints the numbers were read from; `statement` → the policy's own."""


class Published(_Entry):
    """A checkpoint is in the store: computed here, or brought from elsewhere."""

    action: Literal["publish", "bring"]
    directory: str
    """Its name below checkpoints/."""
    checkpoint: Sha256


class RunBegan(_Entry):
    """A run works in this directory, or goes on."""

    action: Literal["begin"] = "begin"
    run_id: str
    place: str
    """Where its lifecycle.json and report lie, below the output directory."""
    facts: dict[str, Any]
    """What its lifecycle.json says as long as it has not ended."""
    tracking: str
    """MLflow's address; empty where its store is the output directory's own."""
    experiment: str
    name: str
    """Of the run in MLflow."""
    params: Sha256
    """Digest of the run's params in MLflow."""
    tags: dict[str, str]
    """Of the run in MLflow, as far as X-ray writes them."""


class RunEnded(_Entry):
    """A run ended, and left files for people."""

    action: Literal["end"] = "end"
    run_id: str
    status: str


class Left(_Entry):
    """Something else left files for people."""

    action: Literal["files"] = "files"
    note: str


Entry = Decision | Published | RunBegan | RunEnded | Left


class _Record(InTotoRecord[Annotated[Entry, Field(discriminator="action")]]):
    predicate_type: Literal["urn:xray:log:v1"] = Field("urn:xray:log:v1", alias="predicateType")


class Head(NamedTuple):
    """Where a log ends: how many entries, and the digest of the last."""

    entries: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.entries}:{self.sha256}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        entries, _, sha256 = text.partition(":")
        if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
            raise ValueError(f"{text!r} is not allowed: must be ENTRIES:SHA256, as `xray audit --all` prints it")
        return cls(int(entries), sha256)


EMPTY = Head(0, START)


@dataclass(frozen=True)
class Line:
    """One line of the log, as it lies there; whether its signature holds is not known yet."""

    number: int
    sha256: str
    text: bytes
    entry: Any
    files: dict[str, str] = field(repr=False)
    """Path below the output directory → sha256."""


def read_lines(output: Path) -> Iterator[Line]:
    """The entries of a log, in order; there are none where there is no log.

    Raises:
        ValueError: the log, or the line that comes next, cannot be read.
    """
    path = output / LOG
    if not os.path.lexists(path):
        return
    try:
        content = read_bounded(path, MAX_BYTES)
    except OSError as error:
        raise ValueError(f"{LOG} cannot be read ({error.strerror})") from None
    for number, text in enumerate(content.splitlines(keepends=True), start=1):
        if not text.endswith(b"\n"):
            raise ValueError(f"line {number} is cut short")
        try:
            record = _Record.model_validate_json(base64.b64decode(json.loads(text)["payload"], validate=True))
        except (ValidationError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"line {number} is no entry ({type(error).__name__})") from None
        files = {subject.name: subject.digest.sha256 for subject in record.subject}
        yield Line(number, hashlib.sha256(text).hexdigest(), text, record.predicate, files)


def readable_lines(output: Path) -> list[Line]:
    """The entries of a log as far as it can be read: what lies behind that is for an audit to name."""
    found = []
    try:
        for line in read_lines(output):
            found.append(line)
    except ValueError:
        pass
    return found


def append(output: Path, private: Path, entry: Entry, files: Mapping[str, str] | None = None) -> None:
    """Sign an entry and write it to the end of the log. Cut short, it is there whole or not at all.

    Args:
        files: path below `output` → sha256.
    """
    with log_lock(output):
        append_locked(output, private, entry, files)


def log_lock(output: Path) -> FileLock:
    """The lock of whoever writes to the log."""
    (output / LOCKS).mkdir(parents=True, exist_ok=True)
    return FileLock(output / LOCKS / "log.lock")


def run_lock(output: Path, run_id: str) -> FileLock:
    """The lock that a run holds as long as it works in `output`."""
    (output / LOCKS).mkdir(parents=True, exist_ok=True)
    return FileLock(output / LOCKS / f"run-{run_id}.lock")


def append_locked(output: Path, private: Path, entry: Entry, files: Mapping[str, str] | None = None) -> None:
    """As `append`, by who holds the lock."""
    path = output / LOG
    # No link is followed, whoever put it there.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "r+b") as file:
        end, last = _whole_end(file)
        previous = hashlib.sha256(last).hexdigest() if last else START
        at = datetime.now(UTC).isoformat(timespec="seconds")
        entry = entry.model_copy(update={"previous": previous, "at": at})
        if isinstance(entry, Decision):
            files = {f"{entry.name}/{entry.version}": entry.checkpoint}
        subject = [{"name": name, "digest": {"sha256": sha}} for name, sha in sorted((files or {}).items())]
        record = _Record.model_validate({"subject": subject, "predicate": entry})
        # A line that a power cut left half written was never an entry.
        file.truncate(end)
        file.seek(end)
        file.write(envelope(record.to_text().encode(), PAYLOAD_TYPE, private).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if end == 0:
        sync(output)


def log_checkpoints(
    output: Path,
    private: Path,
    checkpoints: Mapping[str, str],
    files: Mapping[str, str] | None = None,
    *,
    here: bool,
    renew: bool = False,
) -> None:
    """Say that checkpoints are in the store, as far as the log does not say so already.

    Args:
        checkpoints: directory → sha256.
        files: of the one checkpoint there is, as `digests` gives them.
        here: whether they were computed in this directory.
        renew: whether `files` were just written. Else those the log has keep the digest it has: what somebody changed
            since is not vouched for anew.
    """
    known: dict[str, str] = {}
    held: dict[str, str] = {}
    with log_lock(output):
        for line in readable_lines(output):
            if isinstance(line.entry, Decision):
                if line.entry.action == "prune":
                    known = {name: sha for name, sha in known.items() if sha != line.entry.checkpoint}
                continue
            held |= line.files
            if isinstance(line.entry, Published):
                known[line.entry.directory] = line.entry.checkpoint
        new = {name: sha for name, sha in (files or {}).items() if name not in held or (renew and held[name] != sha)}
        for directory, sha256 in checkpoints.items():
            if new or known.get(directory) != sha256:
                entry = Published(action="publish" if here else "bring", directory=directory, checkpoint=sha256)
                manifest = {f"{CHECKPOINTS}/{directory}/{MANIFEST}": sha256}
                append_locked(output, private, entry, new | manifest)


def leave(output: Path, private: Path, paths: list[Path], note: str) -> None:
    """Say that these files were just written for people, unless the log says the same."""
    files = digests(output, paths)
    with log_lock(output):
        if not files.items() <= listed(output).items():
            append_locked(output, private, Left(note=note), files)


def listed(output: Path) -> dict[str, str]:
    """Path below `output` → sha256 of every file the log lists; whether it is signed is for an audit to say."""
    held: dict[str, str] = {}
    for line in readable_lines(output):
        held |= {} if isinstance(line.entry, Decision) else line.files
    return held


def digests(output: Path, paths: list[Path]) -> dict[str, str]:
    """Path below `output` → sha256 of every file in `paths`, and below those that are directories."""
    found = [p for path in paths for p in (sorted(path.rglob("*")) if path.is_dir() else [path]) if p.is_file()]
    return {path.relative_to(output).as_posix(): file_sha256(path) for path in found}


def mark(output: Path) -> str:
    """What MLflow keeps of the log, so that an audit sees when it has become shorter: which log, and its head."""
    lines = readable_lines(output)
    return f"{lines[0].sha256[:16]}:{Head(len(lines), lines[-1].sha256)}" if lines else ""


def _whole_end(file: Any) -> tuple[int, bytes]:
    """(where the last whole line ends, that line), read from the end of the file."""
    position, tail = file.seek(0, os.SEEK_END), b""
    while position > 0 and tail.count(b"\n") < 2:
        step = min(position, 1 << 16)
        position = file.seek(position - step)
        tail = file.read(step) + tail
    whole = tail[: tail.rfind(b"\n") + 1]
    return position + len(whole), whole[whole.rfind(b"\n", 0, -1) + 1 :]
