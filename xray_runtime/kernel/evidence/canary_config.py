"""How a new champion is tried, which its log entry repeats."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from xray_runtime.kernel.config.section import Count, Positive, Section, UnitInterval


class CanaryConfig(Section):
    """When a canary ends, and how. The signed log keeps these rules with each canary."""

    share: Annotated[float, Field(gt=0.0, le=0.5)] = 0.1
    """The share of users, or of conversations, that the candidate answers."""
    min_feedback: Count = 50
    """A canary passes only after this many people judged each model."""
    max_hours: Positive = 24.0
    """A canary that is still undecided after this many hours ends undecided."""
    max_loss: UnitInterval = 0.1
    """The candidate's mean feedback, from 0 to 1, may be this much below the champion's."""
