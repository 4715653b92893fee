"""How a run of an agent ended. Failures are of three sorts:

- infrastructure: there is no result, and the agent is not to blame. It runs again, is counted, and never becomes a
  reward of 0;
- unusable, by the agent's own word, or broken off, because it raised an error, hung, or broke a limit: the episode has
  no reward, so nothing learns from it;
- the task failed: a low reward like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xray_runtime.agents.posted import Posted, read_posted


@dataclass(frozen=True)
class Outcome:
    """The end of one run of an agent."""

    posted: Posted | None = None
    """Its result; None: it returned none, or failed."""
    broken: str | None = None
    """How the agent broke its episode."""
    infrastructure: str | None = None
    """Why there is no result, without a fault of the agent."""


def outcome_of(result: Any) -> Outcome:
    """The outcome of a returned value; None is no result."""
    if result is None:
        return Outcome()
    try:
        return Outcome(read_posted(result))
    except ValueError as error:
        return Outcome(broken=f"the agent returned no valid result: {error}")
