"""The job that the supervisor passes to the process that runs it."""

from __future__ import annotations

import signal
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from xray.flows.subject import Subject

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that stop a run."""


class Job(BaseModel):
    """A run or a search."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    directory: Path
    """Directory of this job's own files, which only its user can write to."""
    output: Path
    """Directory of servers and logs and, with a config, of the run."""
    subject: Subject
    replace_output: bool = False
    """Whether the workspace of the flow uses `output` instead of its own directory."""
    until: str | None = None
    shorten: bool = False
    search: str | None = None
    as_json: bool = False
    """Whether the result goes to stdout as JSON, and all else to stderr."""
    to_stderr: bool = False
    """Whether all output goes to stderr: the command that started the job writes its own result to stdout."""

    @property
    def file(self) -> Path:
        return self.directory / "job.json"

    @property
    def heartbeat(self) -> Path:
        """Touched whenever the run makes progress."""
        return self.directory / "heartbeat"

    @property
    def ended(self) -> Path:
        """Written by a process that was not killed; contains the reason if the run was lost."""
        return self.directory / "ended"

    @property
    def outputs(self) -> Path:
        """Output directories that the flow chose itself, one a line."""
        return self.directory / "outputs"
