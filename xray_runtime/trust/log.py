"""Writing the signed log of an output directory, and other files of signed lines; see `kernel.evidence.log`.

`private` is everywhere the file of the signing key, by default that of the output directory.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.envelope import InTotoRecord, load_signer, public_key, sign
from xray_runtime.kernel.evidence.kinds.timestamp import AuthorityChosen, LogTimestamps, Stamped
from xray_runtime.kernel.evidence.kinds.witness import LogWitness, WitnessChosen
from xray_runtime.kernel.evidence.lines import MAX_BYTES, LogRecord
from xray_runtime.kernel.evidence.log import END, LOG, digests, view
from xray_runtime.kernel.evidence.view import START, Decision, Left, Published, SignedEntry, lock
from xray_runtime.kernel.files import sync, write_atomic
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, read_bounded
from xray_runtime.kernel.store.manifest import ATTESTATION, MANIFEST, STATEMENT
from xray_runtime.trust.merkle import MerkleTree
from xray_runtime.trust.note import LogCheckpoint, WitnessKey
from xray_runtime.trust.signing import signing_key
from xray_runtime.trust.timestamp import TimestampProblem, request_stamp
from xray_runtime.trust.witness import (
    DirectoryWitness,
    WitnessProblem,
    cosign_log,
    is_server,
    open_witness,
    read_log_checkpoint,
)

LOGGER = logging.getLogger(__name__)
ORIGIN = "xray.log"
RETRY_S = 60.0
"""How long a process waits before it asks a witness again that did not cosign."""
_RETRY_AT: dict[Path, float] = {}


def append(
    output: Path,
    entry: SignedEntry,
    files: Mapping[str, str] | None = None,
    *,
    private: Path | None = None,
    locked: bool = False,
) -> None:
    """Sign an entry and write it to the end of the log: after a crash it is there whole or not at all.

    Args:
        files: path below `output` → sha256.
        locked: the caller holds the lock.
    """
    if isinstance(entry, Decision):
        files = {f"{entry.name}/{entry.version}": entry.checkpoint}
    private = private or signing_key(output)
    with contextlib.nullcontext() if locked else lock(output, "log"):
        line = append_line(output, output / LOG, LogRecord, entry, files or {}, private=private)
        heads, tree = _grown(output, hashlib.sha256(line).hexdigest())
        checkpoint = LogCheckpoint(origin(heads), len(tree), tree.root(len(tree)))
        # After a crash before this, it is that of the line before.
        write_atomic(output / END, str(checkpoint.signed(private.read_bytes())))
    chosen = view(output).state(LogWitness).chosen
    if chosen is not None and time.monotonic() >= _RETRY_AT.get(output, 0.0):
        try:
            _cosign(output, chosen, private)
        except ValueError as problem:
            _RETRY_AT[output] = time.monotonic() + RETRY_S
            LOGGER.error("%s: the log's witness %s: %s", output, chosen.address, problem)


def choose_witness(output: Path, address: str, key: WitnessKey | None, *, by: str) -> WitnessKey:
    """Have a witness cosign this log from here on; returns its key.

    Args:
        address: of a server, or a directory, which is made.
        key: of a server.

    Raises ConfigError: it does not cosign this log.
    """
    try:
        if not is_server(address):
            if not address or "://" in address or Path(address).resolve().is_relative_to(output.resolve()):
                raise WitnessProblem("must be http[s]://… or a directory outside of --output")
            Path(address).mkdir(mode=0o700, parents=True, exist_ok=True)
            address = str(Path(address).resolve())
            key = DirectoryWitness(Path(address), []).key()
        if key is None:
            raise WitnessProblem("--key: the public key that the server prints is required")
        private = signing_key(output)
        if not view(output).heads:
            raise WitnessProblem(f"{output} has no log yet")
        chosen = WitnessChosen(address=address, key=str(key), by=by)
        _cosign(output, chosen, private, is_new=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"ADDRESS: {address!r} is not allowed: {first_line(error)}") from None
    append(output, chosen, private=private)
    return key


def _cosign(output: Path, chosen: WitnessChosen, private: Path, *, is_new: bool = False) -> None:
    with lock(output, "witness"):
        # Entries that another process appends meanwhile are in no checkpoint that was read before.
        checkpoint, tree = read_log_checkpoint(output), _tree(output, "witness")
        tree.follow(view(output).heads)
        witness = open_witness(chosen.address, [public_key(load_signer(private.read_bytes()))])
        cosign_log(output, tree, checkpoint, witness, WitnessKey.parse(chosen.key), is_new=is_new)


def origin(heads: Sequence[str]) -> str:
    """The name of the log with these digests of lines: equal for copies of one log."""
    return f"{ORIGIN}/{heads[0][:16]}"


def _grown(output: Path, last: str) -> tuple[Sequence[str], MerkleTree]:
    """(digests of the lines, Merkle tree over them) of the log whose last line has this digest."""
    heads = view(output).heads
    if not heads or heads[-1] != last:
        # Behind a line that cannot be read, which an audit names.
        content = read_bounded(output / LOG, MAX_BYTES)
        heads = [hashlib.sha256(line).hexdigest() for line in content.splitlines(keepends=True)]
    tree = _tree(output, "log")
    tree.follow(heads)
    return heads, tree


@lru_cache(maxsize=16)
def _tree(output: Path, lock_name: str) -> MerkleTree:
    """A log's tree, for whoever holds a lock."""
    return MerkleTree()


def decide(output: Path, *, by: str | None = None, private: Path | None = None, **fields: Any) -> None:
    """Append a decision; the same registration twice in a row is one.

    Args:
        by: who decides; by default the user of this process.
        fields: of a `Decision`.
    """
    decision = Decision(by=by or getpass.getuser(), **fields)
    with lock(output, "log"):
        last = view(output).decided.get((decision.name, decision.alias)) if decision.action == "register" else None
        facts = {"version", "checkpoint", "evidence", "page"}
        if last is None or last.model_dump(include=facts) != decision.model_dump(include=facts):
            append(output, decision, private=private, locked=True)
            _stamp(output, private)


def choose_authority(output: Path, address: str, certificate: str, *, by: str) -> None:
    """Have a timestamp authority (RFC 3161) stamp the log now and after each decision.

    Args:
        certificate: its root certificate, in PEM.

    Raises ConfigError: it does not stamp this log.
    """
    try:
        with lock(output, "log"):
            if not view(output).heads:
                raise TimestampProblem(f"{output} has no log yet")
            # Tried before it is named.
            request_stamp(address, certificate, read_log_checkpoint(output))
            append(output, AuthorityChosen(address=address, certificate=certificate, by=by), locked=True)
            _stamp(output, None)
    except ValueError as error:
        raise ConfigError(f"ADDRESS: {address!r} is not allowed: {first_line(error)}") from None


def _stamp(output: Path, private: Path | None) -> None:
    """Have the log's authority stamp it, if it has one; the caller holds the lock, so that no entry comes between."""
    authority = view(output).state(LogTimestamps).chosen
    if authority is None:
        return
    try:
        token = request_stamp(authority.address, authority.certificate, read_log_checkpoint(output))
        append(output, Stamped(token=token), private=private, locked=True)
    except ValueError as problem:
        LOGGER.error("%s: the timestamp authority %s: %s", output, authority.address, problem)


def log_checkpoints(
    output: Path,
    checkpoints: Mapping[str, str],
    files: Mapping[str, str] | None = None,
    *,
    here: bool,
    renew: bool = False,
    private: Path | None = None,
) -> None:
    """Log that checkpoints are in the store, unless the log says so already.

    Args:
        checkpoints: directory → sha256.
        files: of the one checkpoint there is, as `digests` gives them.
        here: whether they were computed in this directory.
        renew: whether `files` were just written, and the statements. Otherwise what is in the log keeps its digest: a
            later edit by somebody else is not signed.
    """
    with lock(output, "log"):
        known = view(output)
        new = {
            name: sha
            for name, sha in (files or {}).items()
            if name not in known.files or (renew and known.files[name] != sha)
        }
        for directory, sha256 in checkpoints.items():
            logged = known.published.get(directory)
            statement = _statement(output, directory)
            if logged is not None and logged.checkpoint == sha256 and not renew:
                statement = logged.statement
            entry = Published(
                action="publish" if here else "bring", directory=directory, checkpoint=sha256, statement=statement
            )
            if new or logged is None or (logged.checkpoint, logged.statement) != (sha256, statement):
                manifest = {f"{CHECKPOINTS}/{directory}/{MANIFEST}": sha256}
                append(output, entry, new | manifest, private=private, locked=True)


def _statement(output: Path, directory: str) -> str | None:
    """The sha256 of a checkpoint's signed statement; None without one."""
    with contextlib.suppress(OSError, ValueError):
        content = read_bounded(output / CHECKPOINTS / directory / ATTESTATION / STATEMENT)
        return hashlib.sha256(content).hexdigest()
    return None


def log_files(output: Path, paths: list[Path], note: str, *, private: Path | None = None) -> None:
    """Log files that were just written for people, unless the log lists the same."""
    files = digests(output, paths)
    with lock(output, "log"):
        if not files.items() <= view(output).files.items():
            append(output, Left(note=note), files, private=private, locked=True)


def sign_line(
    output: Path,
    record: type[InTotoRecord[Any]],
    entry: SignedEntry,
    files: Mapping[str, str],
    *,
    private: Path | None = None,
    previous: str = START,
) -> bytes:
    """A line as `append_line` writes it, after the line with the digest `previous`."""
    dated = entry.model_copy(update={"previous": previous, "at": _now()})
    # A statement needs a subject: an entry without files is about the line before, which has no name.
    content = record.of(dated, dict(sorted(files.items())) or {"": previous})
    return sign(content, (private or signing_key(output)).read_bytes())


def append_line(
    output: Path,
    path: Path,
    record: type[InTotoRecord[Any]],
    entry: SignedEntry,
    files: Mapping[str, str],
    *,
    private: Path | None = None,
) -> bytes:
    """Sign an entry and write it to the end of a file: after a crash it is there whole or not at all. Returns the line.

    Args:
        record: the kind of statement that lines of this file are.
        entry: one of its predicates; its `previous` and `at` are set here.
        files: name → sha256 of the subjects.
    """
    end, last = 0, b""
    with contextlib.suppress(FileNotFoundError), _opened(path, "rb", os.O_RDONLY) as file:
        end, last = _whole_end(file)
    previous = hashlib.sha256(last).hexdigest() if last else START
    # Sign before the file is created: if signing fails, nothing is left behind.
    line = sign_line(output, record, entry, files, private=private, previous=previous)
    with _opened(path, "r+b", os.O_RDWR | os.O_CREAT) as file:
        # Overwrite a line that a power cut left half written.
        file.truncate(end)
        file.seek(end)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    if end == 0:
        sync(path.parent)
    return line


def _opened(path: Path, mode: str, flags: int) -> BinaryIO:
    """A file; a link is not followed."""
    return cast("BinaryIO", os.fdopen(os.open(path, flags | os.O_NOFOLLOW, 0o644), mode))


def _whole_end(file: BinaryIO) -> tuple[int, bytes]:
    """(where the last whole line ends, that line), read from the end of the file."""
    position, tail = file.seek(0, os.SEEK_END), b""
    while position > 0 and tail.count(b"\n") < 2:
        step = min(position, 1 << 16)
        position = file.seek(position - step)
        tail = file.read(step) + tail
    complete = tail[: tail.rfind(b"\n") + 1]
    return position + len(complete), complete[complete.rfind(b"\n", 0, -1) + 1 :]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
