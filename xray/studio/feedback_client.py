"""Verdicts on recorded answers, sent to the `xray serve --record` that is writing the store."""

from __future__ import annotations

from typing import Any

import httpx

from xray_runtime.config.validation import ConfigError
from xray_runtime.feedback.recorded_review import RecordedAnswer, RecordedQuestion, signals_of

SECONDS = 15.0


def send_verdict(
    address: str, key: str, question: RecordedQuestion, verdict: str, judge: str, correction: str | None
) -> None:
    """Send a verdict to the feedback API; it is on disk when this returns. Raises ConfigError if it was not taken."""
    for answer, signals in signals_of(question, verdict, correction):
        send_feedback(address, key, answer, judge, signals)


def send_feedback(address: str, key: str, answer: RecordedAnswer, judge: str, signals: dict[str, Any]) -> None:
    """Send feedback about one answer; as `send_verdict`."""
    content = {"answer": answer.id, "model": answer.model, "user": judge, **signals}
    try:
        reply = httpx.post(
            f"{address}/v1/feedback", json=content, headers={"authorization": f"Bearer {key}"}, timeout=SECONDS
        )
    except httpx.HTTPError as error:
        raise ConfigError(f"--serve: {address} does not answer ({type(error).__name__})") from None
    if reply.status_code != 200:
        raise ConfigError(f"--serve: {address} refused the verdict: {reply.text[:300]}")
