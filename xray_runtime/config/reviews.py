"""Which recorded answers people review in MLflow, and whose assessments count."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from xray_runtime.config.engines import Count, Section

Name = Annotated[str, Field(min_length=1, max_length=250)]


class ReviewsConfig(Section):
    """Each field is an option of `xray reviews`."""

    judges: Annotated[tuple[Name, ...], Field(min_length=1, strict=False)]
    """The people whose assessments become feedback, as MLflow names them."""
    queue: Name = "recorded answers"
    """Name of the review queue."""
    limit: Count = 500
    """So many of the newest answers are shown in MLflow."""
    most_of_one: Count = 200
    """Most new feedback that is taken from one judge at a time; the next time takes the rest."""
