"""Journal of answers of sources, written to disk before they are used, so that a resumed attempt gets the same bytes.

    answers.jsonl    {"key": …, "source": …, "step": …, "score": number or null, "why": …}
                     {"key": …, "source": "environment", "step": …, "answer": {…}} or with "failure": why
                     likewise of a teacher behind an address
                     the last line of each write also has "seal": …, which is for all lines of that write

A key is a digest of source, step, row, prompt and reply, or of an episode so far. Writes that are cut short, or not
sealed with the run's key, are dropped and requested again. With a shared store each write is first stored there as an
object, so that an attempt on another machine finds it too.

Answers with `"recorded": true` might differ when asked again. So the checkpoint has them too, in an answers.jsonl
without seals, and a replay takes them from there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.kernel.files import sync, write_atomic
from xray_runtime.kernel.store.seal import Seal, process_seal
from xray_runtime.rewards.source import Batch, Score

if TYPE_CHECKING:
    from xray_runtime.kernel.store.shared import SharedFolder

log = logging.getLogger(__name__)

ANSWERS, SEAL = "answers.jsonl", "seal"
RECORDED, ANSWER = "recorded", "answer"
PUBLISHED = ("key", "source", "step", "score")


class Journal:
    """The answers of one stage. Several threads may use it.

    Args:
        directory: directory of the journal; None: keep nothing.
        shared: folder of the shared store that keeps the answers too.
        seal: signs answers, and verifies those that are read.

    Raises:
        StorageError: the shared store cannot be reached.
    """

    def __init__(self, directory: Path | None, shared: SharedFolder | None = None, seal: Seal | None = None) -> None:
        self._path, self._shared = None if directory is None else directory / ANSWERS, shared
        self._known: dict[str, dict[str, Any]] = {}
        """Key → answer of an earlier attempt."""
        self._lock = threading.Lock()
        self._seal = seal or process_seal()
        self._purpose = purpose_of_answers(directory) if directory is not None else ""
        if self._path is not None and self._path.exists():
            os.truncate(self._path, self._read(self._path.read_bytes(), str(self._path)))
        if shared is not None:
            for name, content in shared.read().items():
                self._read(content, f"{shared.name}/{name}")

    def _read(self, content: bytes, where: str) -> int:
        """Read the sealed writes of `content`; returns the number of bytes in whole writes."""
        num_bytes = 0
        for lines, entries in read_writes(content, self._purpose, self._seal):
            if entries is None:
                log.warning("%s: lines are not sealed with this run's key; their requests are repeated", where)
            for entry in entries or ():
                self._known.setdefault(entry["key"], entry)
            num_bytes += sum(map(len, lines))
        return num_bytes

    def keys(self, source: str, batch: Batch) -> list[str]:
        """The key of each row."""
        step = batch.metadata.get("step", 0)
        rows = enumerate(zip(batch.messages, batch.replies, strict=True))
        return [_digest([source, step, row, messages, reply])[:32] for row, (messages, reply) in rows]

    def find(self, key: str) -> Score | None:
        """The score of an earlier attempt, if there is one."""
        entry = self.entry(key)
        if entry is None:
            return None
        return Score(math.nan if entry["score"] is None else float(entry["score"]), entry["why"])

    def entry(self, key: str) -> dict[str, Any] | None:
        """The line of an earlier attempt, if there is one."""
        return self._known.get(key)

    def entries(self, source: str) -> list[dict[str, Any]]:
        """The lines of a source in an earlier attempt."""
        return [entry for entry in self._known.values() if entry["source"] == source]

    def recorded(self) -> list[dict[str, Any]]:
        """The recorded lines of earlier attempts."""
        return [entry for entry in self._known.values() if entry.get(RECORDED)]

    def write(self, source: str, step: int, entries: Iterable[tuple[str, Score]], *, recorded: bool = False) -> None:
        """Store scores as `write_entries` does. `recorded`: `publish_answers` copies them into the checkpoint."""
        mark = {RECORDED: True} if recorded else {}
        self.write_entries(step, [_line(key, source, step, score) | mark for key, score in entries])

    def write_entries(self, step: int, entries: Iterable[dict[str, Any]]) -> None:
        """Store answers, each with its `key`, on disk and in the shared store."""
        lines = [entry for entry in entries if entry["key"] not in self._known]
        if self._path is None or not lines:
            return
        # One signature for all: there may be thousands of answers.
        sealed = [*lines[:-1], lines[-1] | {SEAL: self._seal.sign(self._purpose, _text(lines))}]
        content = b"".join(json.dumps(line).encode() + b"\n" for line in sealed)
        if self._shared is not None:
            # Named by content, so that another attempt after a kill adds nothing.
            name = _digest(lines)[:32]
            self._shared.write(f"{step:010d}-{name}.jsonl", content)
        with self._lock:
            created = not self._path.exists()
            with self._path.open("ab") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if created:
                sync(self._path.parent)


def publish_answers(journal: Journal, out: Path) -> None:
    """Write the recorded answers into the checkpoint `out`, in an order that does not depend on time."""
    lines = []
    for entry in journal.recorded():
        if ANSWER in entry:
            lines.append(json.dumps({name: entry[name] for name in (*PUBLISHED[:3], ANSWER)}) + "\n")
            continue
        # A judge's reasons are long; only those of failures are ever read again.
        why = {} if entry["score"] is not None else {"why": entry["why"]}
        lines.append(json.dumps({name: entry[name] for name in PUBLISHED} | why) + "\n")
    if lines:
        write_atomic(out / ANSWERS, "".join(sorted(lines)).encode())


def restore_answers(checkpoint: Path, journal: Journal) -> set[str]:
    """Write the answers in a checkpoint to `journal`, as an earlier attempt would; returns their sources.

    Raises ValueError if the file is damaged.
    """
    path, entries = checkpoint / ANSWERS, list[dict[str, Any]]()
    for number, line in enumerate(path.read_bytes().splitlines() if path.is_file() else [], start=1):
        try:
            read = json.loads(line)
            if isinstance(read.get(ANSWER), dict):
                given = {"key": str(read["key"]), "source": str(read["source"]), "step": int(read["step"])}
                entries.append(given | {ANSWER: read[ANSWER], RECORDED: True})
                continue
            key, source, step, value = (read[name] for name in PUBLISHED)
            score = Score(math.nan if value is None else float(value), read.get("why"))
            entries.append(_line(str(key), str(source), int(step), score) | {RECORDED: True})
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{path}, line {number}: damaged") from None
    journal.write_entries(0, entries)
    return {entry["source"] for entry in entries}


def _text(entry: Any) -> bytes:
    return json.dumps(entry, sort_keys=True).encode()


def _digest(entry: Any) -> str:
    return hashlib.sha256(_text(entry)).hexdigest()


def purpose_of_answers(directory: Path) -> str:
    """The purpose of seals in a directory, whose name has stage and key on every machine."""
    return f"{ANSWERS}/{directory.name}"


def read_writes(content: bytes, purpose: str, seal: Seal) -> Iterator[tuple[list[bytes], list[dict[str, Any]] | None]]:
    """(lines, their answers) of each whole write in a journal; None: its seal is not valid. What a kill cut short at
    the end is left out."""
    lines, entries = list[bytes](), list[dict[str, Any]]()
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            return
        lines.append(line)
        try:
            entry: dict[str, Any] = json.loads(line)
            sealed = entry.pop(SEAL, None)
            entry["key"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            yield lines, None
            lines, entries = [], []
            continue
        entries.append(entry)
        if sealed is not None:
            yield lines, entries if seal.holds(purpose, _text(entries), sealed) else None
            lines, entries = [], []


def _line(key: str, source: str, step: int, score: Score) -> dict[str, Any]:
    value = None if math.isnan(score.value) else score.value
    return {"key": key, "source": source, "step": step, "score": value, "why": score.why}
