"""Which of the served answers `xray serve --record` keeps, and for how long."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xray_runtime.config.engines import Count, Section
from xray_runtime.config.sources import Function

Route = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]


class RecordingConfig(Section):
    """Each field can be set with `xray serve --record --set FIELD=VALUE`."""

    routes: Annotated[tuple[Route, ...], Field(strict=False)] = ()
    """Paths on which people have agreed to be recorded. On others, and on these for `x-xray-record: no`, only requests
    with the header `x-xray-record: yes` are."""
    sample: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """The share of these requests that is kept, drawn at random."""
    redact: Function | None = None
    """`module:function`, called with the texts of each record before it is encrypted: `{"request": …, "answer": …}` or
    `{"feedback": …}`. It returns what may be kept, or None to keep nothing."""
    retention_days: Count = 30
    """Records are removed once they are older."""
    answers_per_hour: Count = 1000
    """Most answers to one user that are kept in an hour."""
    feedback_per_hour: Count = 60
    """Most feedback that is taken from one user in an hour."""
