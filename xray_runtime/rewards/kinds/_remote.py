"""Fields that services and judges share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from xray_runtime.kernel.config.section import Count, NonNegative, Positive, Section
from xray_runtime.kernel.config.sources import Address


class RemoteConfig(Section):
    """Limits and retries of requests to a server."""

    url: Address
    timeout_s: Positive = 60.0
    """A request fails if it takes longer."""
    retries: Annotated[int, Field(ge=0)] = 6
    """Number of times a failed request is repeated."""
    backoff_s: NonNegative = 1.0
    """Pause before the first repetition; each further pause is twice as long. The defaults survive an outage of a
    minute."""
    concurrency: Count = 8
    """Maximum number of concurrent requests."""
