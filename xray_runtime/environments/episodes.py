"""What the parent knows of an episode, and of a request in flight."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


class EnvironmentFailure(RuntimeError):
    """An episode has failed, by what it did; one line that names it and the cause."""


@dataclass(eq=False)
class Episode:
    number: int
    key: int
    """Its number in the worker, where no two episodes ever share one."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """Requests that were answered."""
    request: dict[str, Any] | None = None
    future: Future[dict[str, Any]] | None = None
    """Of `request`."""
    is_sent: bool = False
    """Whether `request` was sent to the process as it is now."""
    is_present: bool = False
    """Whether the process as it is now has been told of it."""
    deaths: int = 0
    """Processes that were lost while `request` was in flight."""


@dataclass
class Sent:
    """A request in flight."""

    episode: Episode
    op: str
    is_replay: bool
    since: float
    """When it was sent, or when user code was called."""
    has_begun: bool = False


def failure(number: int, cause: str) -> EnvironmentFailure:
    """That of episode `number`."""
    return EnvironmentFailure(f"episode {number}: {cause}")


def fail(future: Future[dict[str, Any]], error: Exception) -> None:
    """End what waits for an answer."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
