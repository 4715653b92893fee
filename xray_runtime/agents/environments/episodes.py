"""Episodes and requests in flight, as the parent process knows them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


class EnvironmentFailure(RuntimeError):
    """An episode failed through its own fault; one line with its number and the cause."""


@dataclass(eq=False)
class PooledEpisode:
    number: int
    key: int
    """Its number in the worker, which is never reused."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """Answered requests."""
    request: dict[str, Any] | None = None
    future: Future[Any] | None = None
    """Future of `request`."""
    is_sent: bool = False
    """Whether `request` was sent to the current process."""
    is_present: bool = False
    """Whether the current process knows the episode."""
    deaths: int = 0
    """Number of processes that were lost while `request` was in flight."""


@dataclass
class Sent:
    episode: PooledEpisode
    op: str
    is_replay: bool
    since: float
    """Time when it was sent, or when user code was called."""
    has_begun: bool = False


def fail(future: Future[Any], error: Exception) -> None:
    """Set the exception of a future, unless it was cancelled."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
