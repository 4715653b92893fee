"""The recorder of `xray serve --record`: one Ray actor beside the command keeps the answers that replicas copy to it.

Rows wait in memory until their segment is on disk; only then is a call of `keep` or `feedback` answered. If the disk is
full or unavailable, writing is retried, the replicas' outboxes fill, and they count what is lost. If this process is
killed, Ray starts it again, and the replicas send again what was not on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from xray_runtime.cluster.pool.nodes import same_node
from xray_runtime.data.gold import import_function
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.cores import give_way
from xray_runtime.kernel.errors import error_summary
from xray_runtime.kernel.history.recorded import SegmentWriter
from xray_runtime.kernel.history.recorded_rows import KEYS, RECORDED, RecordedRow, UserKeys, about, feedback_row
from xray_runtime.kernel.processes import LOW_PRIORITY, redirect_output
from xray_runtime.live.feedback.answers import HourlyLimit, parse_feedback
from xray_runtime.live.serving import NotServedError
from xray_runtime.live.serving.config import RecordingConfig
from xray_runtime.live.serving.exchange import Exchange, texts_of
from xray_runtime.live.serving.recorded_index import RecordedIndex

log = logging.getLogger(__name__)

SEGMENT_SECONDS = 30.0
"""Longest time that a row waits for its segment."""
SEGMENT_ROWS = 2000
"""A segment is written as soon as so many rows wait."""
RETRY_SECONDS = 5.0
"""Between two attempts to write."""
EXPIRE_SECONDS = 3600.0
ANCHOR_SECONDS = 86400.0
FEEDBACK_SECONDS = 5.0
"""Feedback that is not on disk after this is answered with 503."""
CLOSE_SECONDS = 10.0
MAX_FEEDBACK_WAITING = 1000
FEEDBACK_PER_ANSWER = 20

Redact = Callable[[dict[str, Any]], dict[str, Any] | None]


@dataclass(frozen=True)
class RecorderSettings:
    """The settings of a recorder."""

    output: Path
    private: Path
    """File of the signing key."""
    config: RecordingConfig
    applications: Mapping[str, str]
    """Digest of the key (`middleware.key_digest`) → name of the application that may send feedback."""
    redaction: Mapping[str, str]
    """Digests of the code of `config.redact`; each segment names them."""
    path: tuple[str, ...]
    """Directories of Python modules, for `config.redact`."""
    logs: Path | None
    """Directory of the log; None: this process keeps its output."""


class AnswerRecorder:
    def __init__(self, settings: RecorderSettings) -> None:
        if settings.logs is not None:
            # A process that Ray starts again must not fail here.
            with contextlib.suppress(OSError):
                redirect_output(settings.logs / "recorder.log")
            # On a busy machine answers come first.
            give_way(LOW_PRIORITY)
        sys.path += [directory for directory in settings.path if directory not in sys.path]
        self._settings, config = settings, settings.config
        redaction = settings.redaction
        self._about = {"redaction": json.dumps(dict(redaction), sort_keys=True)} if redaction else {}
        self._redact: Redact | None = import_function(config.redact, "redact") if config.redact else None
        self._keys = UserKeys(settings.output / RECORDED / KEYS, writable=True)
        self._answer_limit = HourlyLimit(config.answers_per_hour)
        self._feedback_limit = HourlyLimit(config.feedback_per_hour)
        self._writer: SegmentWriter | None = None
        self._index = RecordedIndex()
        self._rows: dict[str, RecordedRow] = {}
        self._lost = Counter[str]()
        self._hurry = asyncio.Event()
        self._flushing: asyncio.Task[None] | None = None
        self._expired_at = self._anchored_at = -float("inf")

    async def check(self) -> None:
        """Open the store. Raises OSError or ValueError if that fails."""
        await self._opened()

    async def _opened(self) -> SegmentWriter:
        """The store as it is on disk."""
        if self._writer is None:
            writer, index = await asyncio.to_thread(self._open)
            # A segment may be on disk although writing it failed at the end, or the process was killed after it.
            self._rows = {id: row for id, row in self._rows.items() if id not in index}
            for row in self._rows.values():
                index.add_row(row)
            self._writer, self._index = writer, index
        return self._writer

    def _open(self) -> tuple[SegmentWriter, RecordedIndex]:
        settings = self._settings
        writer = SegmentWriter(settings.output, settings.private, settings.config.retention_days)
        return writer, RecordedIndex.read(settings.output, writer.view)

    async def keep(self, batch: list[Exchange], lost: Mapping[str, int], now: bool) -> Mapping[str, int]:
        """Record answers; returns reason → number of those that are left out, once the others are on disk.

        Args:
            lost: reason → answers that a replica lost since its last call.
            now: do not wait for more rows.
        """
        skipped, ids = Counter[str](), []
        self._lost.update(lost)
        for exchange in batch:
            reason = self._admit(exchange)
            if reason is None:
                ids.append(exchange.id)
            else:
                skipped[reason] += 1
        await self._on_disk(ids, now or len(self._rows) >= SEGMENT_ROWS)
        return skipped

    def _admit(self, exchange: Exchange) -> str | None:
        """Add an answer to the waiting rows, unless it is known; returns why it is left out."""
        if exchange.id in self._index:
            return None
        try:
            texts = texts_of(exchange)
        # A client may have sent anything.
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "unreadable"
        # vLLM tells the middleware the numbers of tokens, except of responses.
        usage = texts["answer"].pop("usage", None) or {}
        named = exchange.user or texts["request"].get("user") or ""
        user = self._keys.pseudonym(named if isinstance(named, str) else json.dumps(named))
        if not self._answer_limit.allows(user):
            return "too many of one user"
        redacted = self._redacted(texts)
        if redacted is None:
            return "redacted"
        row = RecordedRow(
            kind="answer",
            id=exchange.id,
            answer=exchange.id,
            at_ms=exchange.at_ms,
            user=user,
            application=exchange.application,
            model=exchange.model,
            route=exchange.route,
            streamed=exchange.streamed,
            complete=exchange.complete,
            latency_s=exchange.latency_s,
            first_s=exchange.first_s,
            prompt_tokens=exchange.prompt_tokens or usage.get("input_tokens", 0),
            reply_tokens=exchange.reply_tokens or usage.get("output_tokens", 0),
            texts=self._keys.encrypt(user, redacted, about("answer", exchange.id, exchange.model)),
            canary=exchange.canary,
        )
        self._add(row)
        return None

    def _add(self, row: RecordedRow) -> None:
        self._rows[row.id] = row
        self._index.add_row(row)

    def _redacted(self, texts: dict[str, Any]) -> dict[str, Any] | None:
        """The texts that may be kept; None: none may."""
        if self._redact is None:
            return texts
        try:
            redacted = self._redact(texts)
            json.dumps(redacted)
        # A user's function may fail in any way; what it did not pass is not kept.
        except Exception:
            log.exception("recording: %s failed", self._settings.config.redact)
            return None
        return redacted if isinstance(redacted, dict) else None

    async def feedback(self, body: bytes, key: str) -> tuple[int, dict[str, Any]]:
        """Take feedback; returns the HTTP status and the content of the answer.

        Args:
            key: digest of the request's key.
        """
        application = self._settings.applications.get(key)
        if application is None:
            return _error(401, "the feedback key is missing or wrong")
        try:
            feedback = parse_feedback(body)
        except ConfigError as error:
            return _error(400, str(error))
        answer = self._index.answers.get(feedback.answer_id)
        if answer is None:
            return _error(404, f"answer: {feedback.answer!r} is not a recorded answer, or is too old")
        if answer.application not in ("", application):
            return _error(403, f"answer: {feedback.answer!r} belongs to another application")
        if feedback.model not in (None, answer.model):
            return _error(400, f"model: {feedback.model!r} is not allowed: the answer is by {answer.model}")
        user = answer.user if feedback.user is None else self._keys.pseudonym(feedback.user)
        signals = feedback.signals()
        # Feedback that is sent twice is the same feedback.
        identity = self._keys.feedback_id(application, user, feedback.answer_id, signals)
        if identity not in self._index:
            if not self._feedback_limit.allows(f"{application} {user}") or answer.num_feedback >= FEEDBACK_PER_ANSWER:
                return _error(429, "too much feedback by this user, or about this answer")
            redacted = self._redacted({"feedback": signals})
            if redacted is None:
                return _error(422, "the feedback is not kept: the redaction refused it")
            if len(self._rows) >= SEGMENT_ROWS + MAX_FEEDBACK_WAITING:
                return _error(503, "the store cannot be written: send it again later")
            texts = self._keys.encrypt(user, redacted, about("feedback", identity, answer.model), also=answer.user)
            self._add(feedback_row(identity, feedback.answer_id, user, application, answer.model, texts))
        try:
            await asyncio.wait_for(self._on_disk([identity], now=True), FEEDBACK_SECONDS)
        except TimeoutError:
            return _error(503, "the store cannot be written: send it again later")
        return 200, {"id": identity, "answer": feedback.answer_id, "kept": True}

    async def close(self) -> None:
        """Write what waits, and name the chain's end in the signed log."""
        await self._on_disk(list(self._rows), now=True)
        if self._writer is not None:
            await asyncio.to_thread(self._writer.anchor)

    async def _on_disk(self, ids: list[str], now: bool) -> None:
        """Return once none of `ids` waits."""
        if now:
            self._hurry.set()
        while any(id in self._rows for id in ids):
            if self._flushing is None or self._flushing.done():
                self._flushing = asyncio.create_task(self._flush())
            await asyncio.shield(self._flushing)

    async def _flush(self) -> None:
        """Write one segment, when it is full, hurried or late; wait a little if that fails."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), SEGMENT_SECONDS)
        try:
            writer = await self._opened()
            self._hurry.clear()
            rows, lost = list(self._rows.values()), dict(self._lost)
            await asyncio.to_thread(self._write, writer, rows, lost)
        # The disk is full or unavailable, the key cannot be read, …: serving continues.
        except Exception as error:
            self._writer = None
            # The next attempt must not wait for more rows.
            self._hurry.set()
            log.warning("recording: %d rows wait for the disk (%s: %s)", len(self._rows), type(error).__name__, error)
            await asyncio.sleep(RETRY_SECONDS)
            return
        self._lost = self._lost - Counter(lost)
        for row in rows:
            del self._rows[row.id]

    def _write(self, writer: SegmentWriter, rows: list[RecordedRow], lost: Mapping[str, int]) -> None:
        if rows or lost:
            writer.write(rows, lost, self._about)
        now = time.monotonic()
        if now - self._expired_at > EXPIRE_SECONDS:
            writer.expire()
            self._expired_at = now
        if now - self._anchored_at > ANCHOR_SECONDS:
            writer.anchor()
            self._anchored_at = now


@dataclass(frozen=True)
class RecorderHandle:
    """A recorder that runs."""

    actor: Any
    config: RecordingConfig

    def close(self) -> bool:
        """Have everything on disk, and end it; False if that takes more than CLOSE_SECONDS."""
        done, _ = ray.wait([self.actor.close.remote()], timeout=CLOSE_SECONDS)
        ray.kill(self.actor)
        return bool(done)


def start_recorder(settings: RecorderSettings) -> RecorderHandle:
    """Start the recorder on this machine; Ray must be up. Raises NotServedError if the store cannot be used."""
    options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": same_node()}
    actor = ray.remote(AnswerRecorder).options(**options).remote(settings)
    try:
        ray.get(actor.check.remote())
    except ray.exceptions.RayError as error:
        raise NotServedError(f"--record: {error_summary(error)}") from error
    return RecorderHandle(actor, settings.config)


def _error(status: int, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": message, "code": status}}
