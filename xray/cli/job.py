"""A job: what the supervisor hands to the process that runs it, and how that says how it ended."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from xray.flows.subject import Subject
from xray_runtime.config.loading import validate

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""How people ask for the end."""
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""Exit codes; `deployments.local_services.LOST` is the job process's alone."""


class Job(BaseModel):
    """What a command hands to the process that runs it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    place: Path
    """Directory of this job's own files."""
    output: Path
    """Of servers, logs and, for a config, of the run."""
    config: dict[str, Any] | None = None
    """Of the shipped lifecycle."""
    flow: str | None = None
    """`module:flow` of a user's own."""
    parameters: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    """`STAGE.FIELD` → value, in place of what the flow says."""
    replace_output: bool = False
    """Whether the workspace that the flow opens goes to `output`, whatever the flow names."""
    until: str | None = None
    shorten: bool = False
    search: str | None = None
    as_json: bool = False

    def subject(self) -> Subject:
        """What is run or searched. Raises ConfigError where the config is not allowed."""
        config = validate(self.config) if self.config is not None else None
        return Subject(config=config, flow=self.flow, parameters=self.parameters, fields=self.fields)

    @property
    def file(self) -> Path:
        """The job itself, as JSON."""
        return self.place / "job.json"

    @property
    def heartbeat(self) -> Path:
        """Touched at every sign of progress."""
        return self.place / "heartbeat"

    @property
    def ended(self) -> Path:
        """Left by a process that ends by itself; holds why, where the run was lost."""
        return self.place / "ended"

    @property
    def outputs(self) -> Path:
        """Lists the output directories that a flow has chosen itself, one a line."""
        return self.place / "outputs"
