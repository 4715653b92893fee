"""Reading the signed log of an output directory: what was published, decided and left there, in order.

    log.jsonl        one entry a line: an in-toto statement in a DSSE envelope, signed with the directory's key

Each entry names the digest of the line before it, so no entry can be removed, inserted or changed; and it lists files
by sha256: the last entry about a file counts. An audit finds files without an entry and entries without a file.

    log.checkpoint   the number of lines and the root of a Merkle tree over them, signed anew at each entry
    log.cosigned     the last such checkpoint that the log's witness cosigned
    log.state        of a long log, the state after its first lines (`kept_state`)

A log that was cut short is found by comparing it with its `log.checkpoint`, and with what others kept: a witness,
MLflow, `--since-verified`, or a person (`xray audit --expect`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.envelope import TrustedKey, Verifier, load_public
from xray_runtime.kernel.evidence.kept_state import STATE, FoldedLines, read_state, with_line, write_state
from xray_runtime.kernel.evidence.lines import (
    MAX_BYTES,
    ChainCheck,
    ChainProblem,
    LogRecord,
    parse_line,
)
from xray_runtime.kernel.evidence.view import LogView, SignedEntry
from xray_runtime.kernel.store.checkpoints import open_bounded, read_bounded
from xray_runtime.kernel.store.identity import file_sha256

LOG, END, COSIGNED = "log.jsonl", "log.checkpoint", "log.cosigned"
LIFECYCLE, REPORT = "lifecycle.json", "report.html"
"""Written by each run: for programs, and for people."""
PUBLIC_KEY = "keys/signing.pub"
"""The key that signs today, in an output directory."""
LAST_BYTES = 2**18
"""How much of a log is read to find its last entry."""


class LogTail:
    """The state of one log, kept up to date by parsing only the lines appended since it was last read.

    The digest of the last line read stands for all lines before it, since each names the digest of the one before. If
    that line is no longer where it was (the log was cut short, or replaced), everything is read again. An edit of an
    earlier line leaves a process with the state of the lines it read; an audit reads all lines, and finds the edit.

    Args:
        verifier: the state is then that of the lines before the first that is not sound; without it, of those before
            the first that cannot be read.
    """

    def __init__(self, path: Path, verifier: Verifier | None = None) -> None:
        self._path, self._verifier = path, verifier
        self._lock = threading.Lock()
        self._restart()

    def view(self) -> LogView:
        """The state now. It never changes: a later call returns another one."""
        with self._lock:
            return self._read()

    def sound_view(self) -> LogView:
        """The state now. Raises ValueError unless every line is sound."""
        with self._lock:
            read = self._read()
            if self._problem:
                raise ValueError(f"{self._path.name}: {self._problem}")
            return read

    def _read(self) -> LogView:
        try:
            with open_bounded(self._path, MAX_BYTES) as file:
                self._catch_up(file)
        except (OSError, ValueError) as error:
            self._restart()
            self._problem = "it is not there" if isinstance(error, FileNotFoundError) else first_line(error)
        return self._folded.view

    def _restart(self, folded: FoldedLines | None = None) -> None:
        # A view of its own: what is asked of one adds empty states to it.
        self._folded = folded or FoldedLines()
        self._problem = ""
        """Why the next line is not sound, or cannot be read."""
        self._status: tuple[int, ...] = ()

    def _begin(self, file: BinaryIO, size: int) -> None:
        """Begin with the state that was kept beside the log, if the log still has the line in which it ends."""
        kept = own_state(self._path.with_name(STATE), self._verifier)
        if kept is not None and kept.offset <= size and self._has(file, kept):
            self._restart(kept)

    def keep(self, private: bytes, every: int) -> None:
        """Keep the state for other processes, if all lines are sound and so many are new since it was last kept."""
        with self._lock:
            view = self._read()
            if self._verifier is None or self._problem or self._folded.again is None:
                return
            if view.head.entries - self._folded.num_kept >= every:
                write_state(self._path.with_name(STATE), self._folded, self._verifier, private)
                self._folded = replace(self._folded, num_kept=view.head.entries)

    def _catch_up(self, file: BinaryIO) -> None:
        state = os.fstat(file.fileno())
        # A writer of the file cannot set its change time.
        status = state.st_ino, state.st_size, state.st_ctime_ns
        if status == self._status:
            return
        if not self._continues(file, status):
            self._restart()
            self._begin(file, state.st_size)
        file.seek(self._folded.offset)
        self._folded, error = fold(self._folded, file.read(), self._verifier, chained=self._verifier is not None)
        self._problem = f"line {error.number}: {error}" if isinstance(error, ChainProblem) else str(error or "")
        self._status = status

    def _continues(self, file: BinaryIO, status: tuple[int, ...]) -> bool:
        """Whether a file that changed has the lines that were read still, and perhaps more after them."""
        if not self._status or status[0] != self._status[0] or status[1] <= self._status[1]:
            return False
        return self._has(file, self._folded)

    @staticmethod
    def _has(file: BinaryIO, folded: FoldedLines) -> bool:
        """Whether a file has the last of these lines where it was."""
        file.seek(folded.offset - folded.last_bytes)
        return hashlib.sha256(file.read(folded.last_bytes)).hexdigest() == folded.view.head.sha256


def fold(
    begin: FoldedLines, content: bytes, verifier: Verifier | None, *, chained: bool = True
) -> tuple[FoldedLines, ValueError | None]:
    """(`begin` and the lines of `content` after it, up to the first that is not sound; why that one is not).

    Args:
        verifier: None does not check signatures.
        chained: whether each line must follow the one before it.
    """
    view, check = begin.view.copy(), ChainCheck(verifier)
    if view.heads:
        check.resume(view.heads[-1], begin.signer, begin.retired)
    offset, last_bytes, again, problem = begin.offset, begin.last_bytes, begin.again, None
    try:
        for number, text in enumerate(content.splitlines(keepends=True), view.head.entries + 1):
            line = parse_line(number, text, LogRecord)
            if chained:
                check(line)
            view.add(line)
            offset, last_bytes, again = offset + len(text), len(text), with_line(again, line, view, text)
    except ValueError as error:
        problem = error
    return FoldedLines(view, offset, last_bytes, check.signer, check.retired, again, begin.num_kept), problem


def own_state(path: Path, like: Verifier | None, *, whole: bool = False) -> FoldedLines | None:
    """`read_state` of a file that the key of its directory signed."""
    try:
        own = Verifier([TrustedKey(load_public(read_bounded(path.parent / PUBLIC_KEY)))])
    except (OSError, ValueError):
        return None
    return read_state(path, own, like, whole=whole)


@lru_cache(maxsize=8)
def _tail(output: Path) -> LogTail:
    return LogTail(output / LOG)


def view(output: Path) -> LogView:
    """The log as far as it can be read; an audit says whether that is all, and whether it is signed."""
    return _tail(output).view()


def last_entries(output: Path, state: LogView) -> Iterator[SignedEntry]:
    """The entries in which `state` ends, the newest first, as far as `LAST_BYTES` hold them; none if the log ends
    elsewhere by now."""
    with contextlib.suppress(OSError, ValueError), open_bounded(output / LOG, MAX_BYTES) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
        for number, text in zip(range(state.head.entries, 0, -1), reversed(file.read().splitlines(True)), strict=False):
            if hashlib.sha256(text).hexdigest() != state.heads[number - 1]:
                return
            entry = parse_line(number, text, LogRecord).entry
            assert isinstance(entry, SignedEntry)
            yield entry


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file; empty where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_bounded(path))
        return content if isinstance(content, dict) else {}
    return {}


def read_run(directory: Path) -> dict[str, Any]:
    """The content of the lifecycle.json in `run_directory`, as `read_object`."""
    return read_object(directory / LIFECYCLE)


def digests(output: Path, paths: list[Path]) -> dict[str, str]:
    """Path below `output` → sha256 of every file in `paths`, and below those that are directories."""
    files = [p for path in paths for p in (sorted(path.rglob("*")) if path.is_dir() else [path]) if p.is_file()]
    return {path.relative_to(output).as_posix(): file_sha256(path) for path in files}
