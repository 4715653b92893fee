"""A person's decision whether a stage continues."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """A person's answer to `Recorder.ask`."""

    go_on: bool
    by: str
    """Name that the person gave."""
    note: str
    """The person's reason."""
