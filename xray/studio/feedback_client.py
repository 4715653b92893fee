"""Verdicts on recorded answers, sent to the `xray serve --record` that is writing the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from xray_runtime.kernel.bounded_http import PLAIN, read
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.live.feedback.recorded_review import ReviewedAnswer

SECONDS = 15.0


def send_feedback(address: str, key: str, feedback: Sequence[tuple[ReviewedAnswer, str, dict[str, Any]]]) -> None:
    """`keep_feedback` through the feedback API. Raises ConfigError if any of it is refused."""
    headers = {"authorization": f"Bearer {key}"} | PLAIN
    for answer, judge, signals in feedback:
        content = {"answer": answer.id, "model": answer.model, "user": judge, **signals}
        try:
            with httpx.stream(
                "POST", f"{address}/v1/feedback", json=content, headers=headers, timeout=SECONDS
            ) as reply:
                message = b"" if reply.status_code == 200 else read(reply, SECONDS)
        except httpx.HTTPError as error:
            raise ConfigError(f"--serve: {address} does not answer ({type(error).__name__})") from None
        if reply.status_code != 200:
            raise ConfigError(f"--serve: {address} refused the verdict: {message[:300].decode(errors='replace')}")
