"""What a person decided who was asked whether a stage shall go on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """A person's answer to `Recorder.ask`."""

    go_on: bool
    by: str
    """Who it was, as they say."""
    note: str
    """Why."""
