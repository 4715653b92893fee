"""What sources answered, on disk before it is used: an attempt that goes on asks nobody twice, and gets the same bytes.

    answers.jsonl    {"key": …, "source": …, "step": …, "score": number or null, "why": …}
                     {"key": …, "source": "environment", "step": …, "answer": {…}} or with "failure": why

A key is a digest of source, step, row, prompt and reply, or of an episode so far. A line that a kill cut short is
dropped. With a shared store the lines lie there first, an object for each time some were written: an attempt on another
machine finds them too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.files import sync
from xray_runtime.rewards.source import Batch, Score

if TYPE_CHECKING:
    from xray_runtime.store.shared import SharedFolder

log = logging.getLogger(__name__)

ANSWERS = "answers.jsonl"


class Journal:
    """The answers of one stage. Several threads may use it.

    Args:
        directory: None: nothing is kept.
        shared: where they are kept too.

    Raises:
        StorageError: the shared store stayed away.
    """

    def __init__(self, directory: Path | None, shared: SharedFolder | None = None) -> None:
        self._path, self._shared = None if directory is None else directory / ANSWERS, shared
        self._known: dict[str, dict[str, Any]] = {}
        """What attempts before this one left."""
        self._lock = threading.Lock()
        if self._path is not None and self._path.exists():
            os.truncate(self._path, self._read(self._path.read_bytes()))
        if shared is not None:
            for name, content in shared.read().items():
                if name.endswith(_ending(content)):
                    self._read(content)
                else:
                    log.warning("%s/%s was changed; its answers are asked for again", shared.name, name)

    def _read(self, content: bytes) -> int:
        """Take in the lines of `content`; returns the bytes of those that are whole."""
        whole = 0
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
                self._known.setdefault(entry["key"], entry)
            except (ValueError, KeyError, TypeError):
                break
            whole += len(line)
        return whole

    def keys(self, source: str, batch: Batch) -> list[str]:
        """The key of each row."""
        step = batch.metadata.get("step", 0)
        rows = zip(batch.messages, batch.replies, strict=True)
        return [
            hashlib.sha256(json.dumps([source, step, row, said, reply], sort_keys=True).encode()).hexdigest()[:32]
            for row, (said, reply) in enumerate(rows)
        ]

    def find(self, key: str) -> Score | None:
        """The score in an attempt before, if there is one."""
        entry = self.entry(key)
        if entry is None:
            return None
        return Score(math.nan if entry["score"] is None else float(entry["score"]), entry["why"])

    def entry(self, key: str) -> dict[str, Any] | None:
        """The line of an attempt before, if there is one."""
        return self._known.get(key)

    def write(self, source: str, step: int, entries: Iterable[tuple[str, Score]]) -> None:
        """Keep scores, as `write_entries` does."""
        self.write_entries(step, [_line(key, source, step, score) for key, score in entries])

    def write_entries(self, step: int, entries: Iterable[dict[str, Any]]) -> None:
        """Keep answers, each with its `key`; they are on disk, and in the shared store, when this returns."""
        lines = [entry for entry in entries if entry["key"] not in self._known]
        if self._path is None or not lines:
            return
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        if self._shared is not None:
            # Equal answers have one name: a kill in between, and another attempt, add nothing.
            self._shared.write(f"{step:010d}{_ending(content)}", content)
        with self._lock:
            created = not self._path.exists()
            with self._path.open("ab") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if created:
                sync(self._path.parent)


def _ending(content: bytes) -> str:
    return f"-{hashlib.sha256(content).hexdigest()[:32]}.jsonl"


def _line(key: str, source: str, step: int, score: Score) -> dict[str, Any]:
    value = None if math.isnan(score.value) else score.value
    return {"key": key, "source": source, "step": step, "score": value, "why": score.why}
