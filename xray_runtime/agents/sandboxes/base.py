"""The interface of sandboxes: places where untrusted programs run.

Three calls: `start` makes one, `run` runs a program in it, `stop` ends what runs and removes it. Each run finds the
files as `start` gave them. Docker or a cloud of sandboxes stands behind the same calls (`remote`).
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Limits:
    """Limits of one run."""

    timeout_s: float
    memory_mb: int
    """Address space of each process."""
    output_bytes: int
    processes: int
    disk_mb: int


@dataclass(frozen=True)
class Box:
    """A sandbox to start."""

    limits: Limits
    files: Path | None = None
    """Directory whose files it begins with, as copies; None: it is empty."""
    venv: Path | None = None
    """Virtual environment that can be read in it."""
    gateway: str | None = None
    """`http://host:port`, the one address that can be reached from it; None: none."""


@dataclass(frozen=True)
class Program:
    """A program to run in the sandbox's directory."""

    command: list[str]
    stdin: str
    variables: dict[str, str]
    """Its environment, in addition to a few plain variables."""


@dataclass(frozen=True)
class Ended:
    """The end of a run."""

    code: int | None = None
    """Its exit code."""
    output: str = ""
    """The end of its standard output."""
    broken: str | None = None
    """The limit that it broke."""
    infrastructure: str | None = None
    """Why it could not run, or its end is not known."""


class Sandbox(Protocol):
    """Sandboxes on one machine or at one address. Any thread may call its methods."""

    def start(self, box: Box) -> str:
        """Make a sandbox; returns its name. Raises OSError if that fails."""

    def run(self, name: str, program: Program) -> Future[Ended]:
        """Run a program; it never raises."""

    def stop(self, name: str) -> None:
        """End what runs, and remove the sandbox. Nothing happens if it is not there any more."""

    def address(self, gateway: str) -> str:
        """The gateway's `http://host:port` as programs reach it."""

    def close(self) -> None:
        """End everything."""
