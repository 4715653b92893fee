"""What sources answered, on disk before it is used: an attempt that goes on asks nobody twice, and gets the same bytes.

    answers.jsonl    {"key": …, "source": …, "step": …, "score": number or null, "why": …}

A key is a digest of source, step, row, prompt and reply. A line that a kill cut short is dropped.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xray_runtime.files import sync
from xray_runtime.rewards.source import Batch, Score

ANSWERS = "answers.jsonl"


class Journal:
    """The answers of one stage; None as directory: nothing is kept. Several threads may use it."""

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / ANSWERS
        self._known: dict[str, Score] = {}
        """What an attempt before this one left."""
        self._lock = threading.Lock()
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def _read(self, path: Path) -> None:
        whole = 0
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
                score = math.nan if entry["score"] is None else float(entry["score"])
                self._known.setdefault(entry["key"], Score(score, entry["why"]))
            except (ValueError, KeyError, TypeError):
                break
            whole += len(line)
        os.truncate(path, whole)

    def keys(self, source: str, batch: Batch) -> list[str]:
        """The key of each row."""
        step = batch.metadata.get("step", 0)
        rows = zip(batch.messages, batch.replies, strict=True)
        return [
            hashlib.sha256(json.dumps([source, step, row, said, reply], sort_keys=True).encode()).hexdigest()[:32]
            for row, (said, reply) in enumerate(rows)
        ]

    def find(self, key: str) -> Score | None:
        """What was answered in an attempt before, if it was."""
        return self._known.get(key)

    def write(self, source: str, step: int, entries: Iterable[tuple[str, Score]]) -> None:
        """Keep answers; they are on disk when this returns."""
        lines = [_line(key, source, step, score) for key, score in entries if key not in self._known]
        if self._path is None or not lines:
            return
        with self._lock:
            created = not self._path.exists()
            with self._path.open("ab") as file:
                file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
            if created:
                sync(self._path.parent)


def _line(key: str, source: str, step: int, score: Score) -> dict[str, Any]:
    value = None if math.isnan(score.value) else score.value
    return {"key": key, "source": source, "step": step, "score": value, "why": score.why}
