"""Beside the answers of a replica: a copy of those that may be recorded goes to the recorder, and feedback is taken.

Nothing here waits before or during an answer. Copies wait in a bounded outbox until the recorder has them on disk; it
may be unavailable, killed or out of disk space meanwhile. A copy that finds the outbox full is lost and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp as App, Message, Receive, Send

from xray_runtime.live.serving.config import RecordingConfig
from xray_runtime.live.serving.exchange import Exchange
from xray_runtime.live.serving.middleware import CANARY_HEADER, answer_json, key_digest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Keep = Callable[[list[Exchange], Mapping[str, int], bool], Awaitable[Mapping[str, int]]]
    TakeFeedback = Callable[[bytes, str], Awaitable[tuple[int, dict[str, Any]]]]

log = logging.getLogger(__name__)

CONSENT_HEADER, USER_HEADER, APPLICATION_HEADER = "x-xray-record", "x-xray-user", "x-xray-application"
ANSWER_HEADER = "x-xray-answer"
"""With every answer that may be recorded: its id, for feedback."""
FEEDBACK_PATH = "/v1/feedback"
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_FEEDBACK_BYTES = 256 * 2**10
MAX_NAME = 256
MAX_WAITING, MAX_WAITING_BYTES = 8192, 128 * 2**20
"""Size of the outbox."""
BATCH_SECONDS = 0.2
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Wait before a batch is sent again; doubled each time."""
DRAIN_SECONDS = 8.0
COUNTERS = {"kept": "xray_recorded_answers", "lost": "xray_lost_answers", "skipped": "xray_skipped_answers"}


class Outbox:
    """Copies on their way to the recorder.

    Args:
        keep: `Recorder.keep`; returns reason → number of answers that were not kept, once the others are on disk.
        count: called with a name in COUNTERS, a reason and a number.
    """

    def __init__(self, keep: Keep, count: Callable[[str, str, int], None]) -> None:
        self._keep, self._count = keep, count
        self._rows: list[Exchange] = []
        self._lost = Counter[str]()
        self._waiting = self._bytes = 0
        self._closing = False
        self._tasks = set[asyncio.Task[None]]()
        self._sender: asyncio.Task[None] | None = None

    def offer(self, exchange: Exchange) -> None:
        """Take a copy, unless there is no space for it."""
        if self._waiting >= MAX_WAITING or self._bytes + exchange.size > MAX_WAITING_BYTES:
            self._lost["outbox full"] += 1
            self._count("lost", "outbox full", 1)
            return
        self._waiting += 1
        self._bytes += exchange.size
        self._rows.append(exchange)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while self._rows:
            if not self._closing:
                await asyncio.sleep(BATCH_SECONDS)
            batch, self._rows = self._rows, []
            task = asyncio.create_task(self._deliver(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _deliver(self, batch: list[Exchange]) -> None:
        lost, self._lost = self._lost, Counter[str]()
        wait_s = FIRST_WAIT_S
        while True:
            try:
                skipped = await self._keep(batch, lost, self._closing)
                break
            # The recorder was killed, or its node is gone: Ray raises various errors then.
            except Exception as error:
                log.warning("recording: %d answers wait for the recorder (%s)", self._waiting, type(error).__name__)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        if lost:
            log.warning("recording: answers were lost before this: %s", dict(lost))
        self._waiting -= len(batch)
        self._bytes -= sum(exchange.size for exchange in batch)
        self._count("kept", "", len(batch) - sum(skipped.values()))
        for reason, number in skipped.items():
            self._count("skipped", reason, number)

    async def drain(self) -> None:
        """Have everything on disk, if that takes less than DRAIN_SECONDS."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while self._waiting:
                    await asyncio.sleep(0.02)
        if self._waiting:
            log.warning("recording: %d answers are lost: the recorder did not take them in time", self._waiting)


class RecordingMiddleware:
    """ASGI middleware below `middleware.Tagged`.

    Args:
        sha256: of the model that answers.
        feedback: `Recorder.feedback`.
    """

    def __init__(self, app: App, sha256: str, config: RecordingConfig, outbox: Outbox, feedback: TakeFeedback) -> None:
        self._app, self._sha256, self._config = app, sha256, config
        self._outbox, self._feedback = outbox, feedback

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == FEEDBACK_PATH:
            await self._take_feedback(scope, receive, send)
        elif scope["type"] == "http" and self._is_chosen(scope):
            await self._copied(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_chosen(self, scope: Message) -> bool:
        if scope["path"] not in ROUTES:
            return False
        agreed = _header(scope, CONSENT_HEADER).lower()
        has_agreed = agreed == "yes" or (agreed == "" and scope["path"] in self._config.routes)
        return has_agreed and random.random() < self._config.sample

    async def _copied(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, and offer a copy to the outbox after the last byte."""
        identity, started, at_ms = uuid.uuid4().hex, time.monotonic(), time.time_ns() // 1_000_000
        request, answer = list[bytes](), list[bytes]()
        status, first, is_streamed, is_complete = 0, 0.0, False, False

        async def seen() -> Message:
            message = await receive()
            request.append(message.get("body", b""))
            return message

        async def shown(message: Message) -> None:
            nonlocal status, first, is_streamed, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", ()))
                is_streamed = any(k == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)
                message = {**message, "headers": [*headers, (ANSWER_HEADER.encode(), identity.encode())]}
            await send(message)
            if message["type"] == "http.response.body":
                first = first or time.monotonic() - started
                answer.append(message.get("body", b""))
                is_complete = not message.get("more_body", False)

        # vLLM takes the id of the answer's body from this header.
        others = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        scope = {**scope, "headers": [*others, (b"x-request-id", identity.encode())]}
        state = scope.setdefault("state", {})
        try:
            await self._app(scope, seen, shown)
        finally:
            # A failure of the engine is recorded too: a canary compares them.
            if status == 200 or status >= 500:
                usage = getattr(state.get("request_metadata"), "final_usage_info", None)
                exchange = Exchange(
                    id=identity,
                    at_ms=at_ms,
                    route=scope["path"],
                    model=self._sha256,
                    user=_header(scope, USER_HEADER),
                    application=_header(scope, APPLICATION_HEADER),
                    request=b"".join(request),
                    answer=b"".join(answer),
                    streamed=is_streamed,
                    complete=is_complete and status == 200,
                    latency_s=time.monotonic() - started,
                    first_s=first,
                    prompt_tokens=getattr(usage, "prompt_tokens", None) or 0,
                    reply_tokens=getattr(usage, "completion_tokens", None) or 0,
                    canary=_header(scope, CANARY_HEADER),
                )
                self._outbox.offer(exchange)

    async def _take_feedback(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await answer_json(send, 405, {"error": {"message": f"{FEEDBACK_PATH}: must be a POST", "code": 405}})
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
            if len(body) > MAX_FEEDBACK_BYTES:
                text = f"feedback of more than {MAX_FEEDBACK_BYTES:,} bytes is not allowed"
                await answer_json(send, 413, {"error": {"message": text, "code": 413}})
                return
        scheme, _, key = _header(scope, "authorization", 4096).partition(" ")
        try:
            bearer = key.strip() if scheme.lower() == "bearer" else ""
            status, content = await self._feedback(body, key_digest(bearer))
        # As in `Outbox`: the recorder is unavailable.
        except Exception as error:
            log.warning("recording: feedback cannot be taken (%s)", type(error).__name__)
            status, content = (
                503,
                {"error": {"message": "the recorder is not reachable: send it again later", "code": 503}},
            )
        await answer_json(send, status, content)


def _header(scope: Message, name: str, limit: int = MAX_NAME) -> str:
    for key, value in scope["headers"]:
        if key == name.encode():
            return bytes(value).decode("utf-8", "replace").strip()[:limit]
    return ""


def prometheus_count() -> Callable[[str, str, int], None]:
    """`Outbox`'s `count`, shown by vLLM on /metrics."""
    from prometheus_client import Counter as Metric

    texts = {"kept": "Answers that were recorded", "lost": "Answers that could not be recorded"}
    texts["skipped"] = "Answers that the rules of recording left out"
    metrics = {name: Metric(COUNTERS[name], text, ["reason"]) for name, text in texts.items()}

    def count(name: str, reason: str, number: int) -> None:
        metrics[name].labels(reason).inc(number)

    return count
