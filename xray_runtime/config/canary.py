"""A canary: a candidate that answers a share of the live requests before a person promotes it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from xray_runtime.config.engines import Count, Positive, Section, UnitInterval


class CanaryConfig(Section):
    """When a canary ends, and how. The signed log keeps these rules with each canary."""

    share: Annotated[float, Field(gt=0.0, le=0.5)] = 0.1
    """The share of users, or of conversations, that the candidate answers."""
    min_feedback: Count = 50
    """A canary passes only after this many people judged each model."""
    max_hours: Positive = 24.0
    """A canary that is undecided after this many hours ends so."""
    max_loss: UnitInterval = 0.1
    """The candidate's mean feedback, from 0 to 1, may be this much below the champion's."""
