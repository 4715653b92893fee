"""Sections of `xray serve`: the answers that it keeps, their reviewers, and the canary of a candidate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xray_runtime.kernel.config.section import Count, Section
from xray_runtime.kernel.config.sources import Function

Route = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
Name = Annotated[str, Field(min_length=1, max_length=250)]


class RecordingConfig(Section):
    """Each field can be set with `xray serve --record --set FIELD=VALUE`."""

    routes: Annotated[tuple[Route, ...], Field(strict=False)] = ()
    """Paths on which people have agreed to be recorded. On others, and on these for `x-xray-record: no`, only requests
    with the header `x-xray-record: yes` are."""
    sample: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """The share of these requests to record, chosen at random."""
    redact: Function | None = None
    """`module:function`, called with the texts of each record before it is encrypted: `{"request": …, "answer": …}` or
    `{"feedback": …}`. It returns what may be kept, or None to keep nothing."""
    retention_days: Count = 30
    """Records are removed once they are older."""
    answers_per_hour: Count = 1000
    """Maximum recorded answers per user and hour."""
    feedback_per_hour: Count = 60
    """Maximum feedback per user and hour."""


class ReviewsConfig(Section):
    """Each field is an option of `xray reviews`."""

    judges: Annotated[tuple[Name, ...], Field(min_length=1, strict=False)]
    """The people whose assessments become feedback, as MLflow names them."""
    queue: Name = "recorded answers"
    """Name of the review queue."""
    limit: Count = 500
    """Number of the newest answers to show in MLflow."""
    most_of_one: Count = 200
    """Maximum new feedback per judge and call; the next call takes the rest."""
