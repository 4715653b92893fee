"""What a command says of the workspaces that a flow opens while it runs: the flow itself passes nothing on."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xray.tasks.workspace import Workspace


@dataclass(frozen=True)
class Command:
    """What holds for every workspace that is opened."""

    output: str | None = None
    until: str | None = None
    shorten: bool = False
    on_open: Callable[[Workspace], None] | None = None
    """Called with every workspace that opens: whoever shows progress."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """`STAGE.FIELD` or `runtime.FIELD` → value, in place of what the flow says."""
    place: Path | None = None
    tags: Mapping[str, str] | None = None
    tracking_uri: str | None = None


_COMMAND: contextvars.ContextVar[Command] = contextvars.ContextVar("command")


@contextlib.contextmanager
def commanded(command: Command) -> Iterator[None]:
    """Workspaces that are opened in the block, by whatever flow runs there, follow the command."""
    token = _COMMAND.set(command)
    try:
        yield
    finally:
        _COMMAND.reset(token)


def is_commanded() -> bool:
    """Whether a command runs the flow."""
    return _COMMAND.get(None) is not None


def current_command() -> Command:
    """What the command says; nothing outside of one."""
    return _COMMAND.get(Command())
