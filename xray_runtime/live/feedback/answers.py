"""Feedback about a recorded answer, as applications send it, and its hourly limit."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from xray_runtime.kernel.config.validation import ConfigError, validate_as
from xray_runtime.kernel.history.recorded_rows import ID_DIGITS
from xray_runtime.kernel.store.manifest import Sha256

MAX_TEXT = 2**16
HOUR_S = 3600.0
SIGNALS = ("thumb", "score", "correction", "better", "text")

Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


class FeedbackBody(BaseModel):
    """The body of a POST to /v1/feedback; it has at least one of SIGNALS."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    answer: Annotated[str, Field(pattern=rf"^(chatcmpl-|cmpl-)?[0-9a-f]{{{ID_DIGITS}}}$")]
    """The answer's header `x-xray-answer`, or the `id` in its body."""
    user: Annotated[str, Field(max_length=256)] | None = None
    """The person who judges; default: the one who was answered."""
    model: Sha256 | None = None
    """sha256 of the model that the client expects; feedback about another model's answer is refused."""
    thumb: Literal["up", "down"] | None = None
    score: Annotated[float, Field(ge=0.0, le=1.0, strict=False)] | None = None
    correction: Text | None = None
    """The answer with its errors corrected."""
    better: Text | None = None
    """Another answer, which is better."""
    text: Text | None = None

    @model_validator(mode="after")
    def _has_a_signal(self) -> Self:
        if all(getattr(self, name) is None for name in SIGNALS):
            raise ValueError(f"one of {', '.join(SIGNALS)} is required")
        return self

    @property
    def answer_id(self) -> str:
        return self.answer[-ID_DIGITS:]

    def signals(self) -> dict[str, Any]:
        """The signals that are given, by name."""
        return {name: value for name in SIGNALS if (value := getattr(self, name)) is not None}


def parse_feedback(body: bytes) -> FeedbackBody:
    """Raises ConfigError: one line with field, value and what is allowed."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise ConfigError("the body is not allowed: must be a JSON object") from None
    return validate_as(FeedbackBody, content)


class HourlyLimit:
    """At most `limit` events of each subject in an hour."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._since, self._counts = clock(), Counter[str]()

    def allows(self, subject: str) -> bool:
        """Count an event, unless there were too many."""
        if self._clock() - self._since >= HOUR_S:
            self._since, self._counts = self._clock(), Counter()
        if self._counts[subject] >= self._limit:
            return False
        self._counts[subject] += 1
        return True
