"""Options that a command sets for the workspaces of a flow, which cannot pass them on itself."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Command:
    """Options for every workspace that the flow opens."""

    output: str | None = None
    until: str | None = None
    shorten: bool = False
    on_open: Callable[[Any], None] | None = None
    """Called with every `Workspace` that opens, to show progress."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """`STAGE.FIELD` or `runtime.FIELD` → value; overrides the flow."""
    run_directory: Path | None = None
    tags: Mapping[str, str] | None = None
    tracking_uri: str | None = None


_COMMAND: contextvars.ContextVar[Command] = contextvars.ContextVar("command")


@contextlib.contextmanager
def commanded(command: Command) -> Iterator[None]:
    """Apply `command` to all workspaces that are opened in the block."""
    token = _COMMAND.set(command)
    try:
        yield
    finally:
        _COMMAND.reset(token)


def is_commanded() -> bool:
    """Whether a command runs the flow."""
    return _COMMAND.get(None) is not None


def current_command() -> Command:
    """The current command; an empty one if there is none."""
    return _COMMAND.get(Command())
