"""Exchanges as replicas copy them, and a recorder in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from xray_runtime.live.serving.config import RecordingConfig
from xray_runtime.live.serving.exchange import Exchange
from xray_runtime.live.serving.middleware import key_digest
from xray_runtime.live.serving.recorder import AnswerRecorder, RecorderSettings
from xray_runtime.trust.signing import signing_key

MODEL = "ab" * 32
KEYS = {"shop": "a key of the shop", "desk": "a key of the desk"}
Result = TypeVar("Result")


def exchange(number: int, user: str = "ann", text: str = "how are you", **fields: Any) -> Exchange:
    """A whole chat."""
    request = {"messages": [{"role": "user", "content": text}], "user": user}
    choice = {"index": 0, "message": {"role": "assistant", "content": f"fine {number}"}, "finish_reason": "stop"}
    values: dict[str, Any] = {
        "id": f"{number:032x}",
        "at_ms": 1_700_000_000_000 + number,
        "route": "/v1/chat/completions",
        "model": MODEL,
        "user": "",
        "application": "",
        "request": json.dumps(request).encode(),
        "answer": json.dumps({"id": "chatcmpl-1", "choices": [choice]}).encode(),
        "streamed": False,
        "complete": True,
        "latency_s": 0.5,
        "first_s": 0.25,
        "prompt_tokens": 3,
        "reply_tokens": 2,
    }
    return Exchange(**values | fields)


def settings(output: Path, redaction: Mapping[str, str] | None = None, **config: Any) -> RecorderSettings:
    return RecorderSettings(
        output=output,
        private=signing_key(output),
        config=RecordingConfig(**config),
        applications={key_digest(key): name for name, key in KEYS.items()},
        redaction=redaction or {},
        path=(),
        logs=None,
    )


def with_recorder(output: Path, work: Callable[[AnswerRecorder], Awaitable[Result]], **config: Any) -> Result:
    """Result of `work` with a recorder, which is closed after it."""

    async def run() -> Result:
        recorder = AnswerRecorder(settings(output, **config))
        await recorder.check()
        result = await work(recorder)
        await recorder.close()
        return result

    return asyncio.run(run())


def keep(output: Path, *exchanges: Exchange, **config: Any) -> Mapping[str, int]:
    """Record exchanges in one segment; returns those that were left out."""
    return with_recorder(output, lambda recorder: recorder.keep(list(exchanges), {}, True), **config)
